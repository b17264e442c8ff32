#!/usr/bin/env python3
"""Run the installed vLLM end to end on this machine's GPUs with a tiny Kimi-K3, and say whether its numbers are right.

    python tests/e2e/run.py --out results.json

writes the checkpoints, runs every engine of engine/cases.py, a server under load and servers that are given broken
checkpoints, and compares log-probabilities with a float64 computation of the model.  Needs a Hopper or Blackwell GPU
and an environment with vLLM (patched or stock); two GPUs for tensor parallelism.  Checkpoints (about 1 GB) and logs
are kept in --work.  `python tests/e2e/report.py RESULTS.json.. --out PAGE.md` makes a page of one or more results.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))

import tiny_k3
from engine import cases, compare, faults, pool, prompts, worker
from engine.turns import Turns
from tiny_k3 import damage, vocabulary

HERE = Path(__file__).resolve().parent
PARTS = ("engines", "load", "faults")


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


class Run:
    """One measurement: folders, options, and what is known so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.work: Path = options.work
        self.work.mkdir(parents=True, exist_ok=True)
        measured = {"machine": machine(), "arguments": options.argument}
        self.results: dict[str, Any] = measured | {"engines": {}, "load": {}, "faults": {}, "left_out": {}}
        if options.out.exists():
            try:
                before = json.loads(options.out.read_text())
                other = [what for what, value in measured.items() if before[what] != value]
            except (ValueError, TypeError, KeyError):
                raise SystemExit(f"Error: {options.out} holds no results: remove it, or name another --out") from None
            if other:
                whose = {"machine": "of another machine or build", "arguments": "with other arguments"}[other[0]]
                raise SystemExit(f"Error: {options.out} holds results {whose}: name another --out")
            self.results |= before
        self.folders: dict[str, str] = {}
        self.gpus = pool.Gpus(options.gpus, options.jobs_per_gpu)
        self.writing = threading.Lock()
        self.share = round(0.85 / options.jobs_per_gpu, 3)
        # One for the machine: who measures waits for other runs too.
        self.lock = Path(tempfile.gettempdir()) / "tiny-k3-gpu.lock"

    def save(self) -> None:
        with self.writing:
            self._save()

    def _save(self) -> None:
        new = self.options.out.with_suffix(".new")
        new.write_text(json.dumps(self.results, indent=1, sort_keys=True) + "\n")
        new.replace(self.options.out)

    def write_checkpoints(self) -> None:
        root = self.options.checkpoints or self.work / "checkpoints"
        root.mkdir(parents=True, exist_ok=True)
        for form in tiny_k3.FORMS:
            self.folders[form] = str(self._written(root / form, tiny_k3.write_target, form))
        for form in tiny_k3.DRAFTER_FORMS:
            self.folders[f"drafter-{form}"] = str(self._written(root / f"drafter-{form}", tiny_k3.write_drafter, form))

    @staticmethod
    def _written(folder: Path, write: Any, form: str) -> Path:
        return folder if folder.is_dir() else write(folder, form)

    @property
    def common(self) -> dict[str, Any]:
        """What every job file holds."""
        return {
            "folders": self.folders,
            "vocabulary": vocabulary.VOCABULARY,
            "reserved": vocabulary.FIRST_WORD,
            "share": self.share,
            "lock": str(self.lock),
            "arguments": self.options.argument,
        }

    def python(self, module: str, job: dict[str, Any], name: str, gpus: list[int], limit: float) -> int | None:
        path = self.work / f"{name}.job.json"
        path.write_text(json.dumps(job))
        return pool.run(
            [sys.executable, "-m", module, str(path)],
            self.work / f"{name}.log",
            gpus,
            limit,
            PYTHONPATH=os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        )

    def engine(self, case: cases.Case, gpus: list[int]) -> None:
        say(f"{case.name}: starts on GPU {', '.join(map(str, gpus))}")
        results, tables = self.work / f"{case.name}.json", self.work / f"{case.name}.npz"
        for old in (results, tables, tables.with_suffix(".reloaded.npz")):
            old.unlink(missing_ok=True)
        job = self.common | {"case": case.as_dict(), "results": str(results), "tables": str(tables)}
        code = self.python("engine.worker", job, case.name, gpus, self.options.limit)
        known = json.loads(results.read_text()) if results.exists() else {}
        known["case"], known["exit_code"] = case.as_dict(), code
        if not known.get("finished"):
            log = (self.work / f"{case.name}.log").read_text(errors="replace")
            late = f"not done after {self.options.limit:.0f} s, see --limit" if code is None else None
            known["error"] = "; ".join(filter(None, [late, faults.first_error(log)])) or None
        self.results["engines"][case.name] = known
        self.save()
        state = "done" if known.get("finished") else f"failed: {known['error']}"
        say(f"{case.name}: {state}")

    def arguments(self, case: cases.Case, folders: dict[str, str]) -> dict[str, Any]:
        return worker.merged(worker.engine_arguments(case.as_dict(), folders, self.share), self.options.argument)

    def load(self, gpus: list[int]) -> None:
        case = cases.Case("mixed", drafter="fp8_pb_wo")
        say("load: starts")
        results = self.work / "load.result.json"
        results.unlink(missing_ok=True)
        arguments = self.arguments(case, self.folders)
        job = self.common | {
            "arguments": arguments,
            "gpus": gpus,
            "results": str(results),
            "server_log": str(self.work / "load.server.log"),
            "seconds": self.options.load_seconds,
            "limit": self.options.limit,
        }
        code = self.python("engine.load", job, "load", gpus, self.options.limit + self.options.load_seconds + 120)
        known = json.loads(results.read_text()) if results.exists() else {}
        if not known:
            log = (self.work / "load.log").read_text(errors="replace")
            known = {"error": faults.first_error(log) or log[-500:]}
        # The answers that were compared with stay in --work.
        known.pop("alone", None)
        self.results["load"] = {**known, "exit_code": code}
        self.save()
        say(f"load: {known.get('answers') or known}")

    def fault(self, name: str, gpus: list[int]) -> None:
        say(f"fault {name}: starts")
        fault = damage.FAULTS[name]
        with tempfile.TemporaryDirectory(dir=self.work) as scratch:
            folders = dict(self.folders)
            broken = Path(scratch) / "broken"
            which = "drafter-fp8_pb_wo" if name in damage.OF_DRAFTER else "mixed"
            shutil.copytree(folders[which], broken)
            fault(broken)
            folders[which] = str(broken)
            drafter = "fp8_pb_wo" if name in damage.OF_DRAFTER else None
            case = cases.Case("mixed", drafter=drafter, graphs=False)
            arguments = self.arguments(case, folders)
            log = self.work / f"fault-{re.sub(r'[^a-z]+', '-', name)}.log"
            with contextlib.closing(Turns(self.lock)) as turns:
                turns.share()
                known = faults.give(sys.executable, arguments, gpus, log, self.options.limit)
            if known.get("error"):
                known["error"] = known["error"].replace(str(broken), "CHECKPOINT")
        self.results["faults"][name] = known
        self.save()
        say(f"fault {name}: {known}")

    def compare(self) -> None:
        """Differences of every engine that scored the prompts to the float64 computation and to one another."""
        batch = prompts.prompts(vocabulary.VOCABULARY, reserved=vocabulary.FIRST_WORD)
        exact = {file.stem: unpacked(file) for file in (self.work / "exact").glob("*.npz")}
        for name, known in self.results["engines"].items():
            path = self.work / f"{name}.npz"
            case = known["case"]
            if path.exists():
                tables = unpacked(path)
                after = self.work / f"{name}.reloaded.npz"
                if case["target"] in exact:
                    known["to_exact"] = compare.difference(tables, exact[case["target"]], batch)
                    if after.exists():
                        known["reloaded_to_exact"] = compare.difference(unpacked(after), exact[case["target"]], batch)
                like = self.work / f"{cases.Case('reference', cache=case['cache']).name}.npz"
                if like.exists():
                    known["to_reference"] = compare.difference(tables, unpacked(like), batch)
            generated = known.pop("generated", None)
            if generated:
                for which in ("generated_again", "generated_reloaded"):
                    if which in known:
                        known[which.replace("generated", "same")] = compare.continuations(known.pop(which), generated)

    def exact(self, gpus: list[int]) -> None:
        path = self.work / "exact"
        job = self.common | {"results": str(path), "forms": list(tiny_k3.FORMS)}
        say("float64: starts")
        code = self.python("engine.exact", job, "exact", gpus, self.options.limit)
        if code != 0:
            say(f"float64: failed, see {self.work / 'exact.log'}")
            self.results["exact_error"] = (self.work / "exact.log").read_text(errors="replace")[-1000:]
        else:
            self.results["expected"] = json.loads((path / "expected.json").read_text())
            say("float64: done")
        self.save()

    def everything(self) -> None:
        self.write_checkpoints()
        say(f"checkpoints: {', '.join(self.folders)}")
        for stage in self.stages():
            self.gpus.each(stage)
            if "engines" in self.options.parts:
                self.compare()
            self.save()

    def stages(self) -> Iterator[list[Any]]:
        """What may run side by side, one lot after the other."""
        first: dict[tuple[str, int], Any] = {}
        others, timed = [], []
        if "engines" in self.options.parts:
            for case in cases.chosen(self.options.case, len(self.options.gpus)):
                if case.needs_blackwell and self.results["machine"]["capability"] < 10:
                    say(f"{case.name}: left out, Blackwell only")
                    self.results["left_out"][case.name] = "needs Blackwell"
                    continue
                task = (case.tp, lambda gpus, case=case: self.engine(case, gpus))
                if case.timed:
                    timed.append(task)
                elif first.setdefault((case.target, case.tp), task) is not task:
                    others.append(task)
            # Kernels are compiled by one engine of a kind, and found in the caches by those that start together.
            yield [(1, self.exact), *first.values()]
        if "load" in self.options.parts:
            others.append((1, self.load))
        if "faults" in self.options.parts:
            others += [(1, lambda gpus, name=name: self.fault(name, gpus)) for name in damage.FAULTS]
        yield others
        yield timed


def unpacked(path: Path) -> list[np.ndarray]:
    with np.load(path) as tables:
        return [tables[name] for name in tables.files]


def machine() -> dict[str, Any]:
    """What was measured, on what."""
    code = (
        "import json, torch, vllm; names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())];"
        "print(json.dumps([vllm.__version__, torch.__version__, torch.version.cuda, names,"
        "torch.cuda.get_device_capability()[0] if names else 0]))"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if asked.returncode:
        raise SystemExit(f"Error: {sys.executable} cannot import vllm and torch: run this with an environment that can")
    version, torch, cuda, gpus, capability = json.loads(asked.stdout.splitlines()[-1])
    patches = None
    for found in metadata.distributions(name="vllm"):
        text = found.read_text("k3-patches.json")
        if text and found.version == version:
            patches = [patch["name"] for patch in json.loads(text)["patches"]]
    return {"gpus": gpus, "vllm": version, "torch": torch, "cuda": cuda, "patches": patches, "capability": capability}


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the results, JSON; what is in it is kept and added to")
    parser.add_argument("--work", type=Path, default=Path("e2e-work"), help="checkpoints and logs (e2e-work)")
    parser.add_argument("--checkpoints", type=Path, help="use or write the checkpoints here instead of below --work")
    parser.add_argument("--gpus", type=lambda text: [int(n) for n in text.split(",")], default=[0], help="0,1 (0)")
    parser.add_argument("--jobs-per-gpu", type=int, default=1, help="engines that share a GPU at a time (1)")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), help=",".join(PARTS))
    parser.add_argument("--case", action="append", default=[], help="only this engine; may be given again")
    parser.add_argument("--load-seconds", type=int, default=180, help="how long the server is under load (180)")
    parser.add_argument(
        "--limit", type=float, default=900, help="seconds for one engine, its waiting for others included (900)"
    )
    parser.add_argument("--argument", type=json.loads, default={}, help="JSON of further arguments for every engine")
    made = parser.parse_args(arguments)
    if unknown := set(made.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(unknown)}")
    try:
        cases.chosen(made.case, len(made.gpus))
    except LookupError as e:
        parser.error(str(e.args[0]))
    return made


if __name__ == "__main__":
    measurement = Run(options())
    if not measurement.results["machine"]["gpus"]:
        raise SystemExit("Error: torch finds no CUDA GPU here: run this on a machine that has one")
    measurement.everything()
