"""What runs engines and judges them, with a stand-in for vLLM: errors are seen, recorded, and end nothing else."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent))

import report
import run
from engine import cases, compare, exact, faults, load, pool, prompts, worker
from engine.server import serving
from engine.turns import Turns
from tiny_k3 import damage

HERE = Path(__file__).resolve().parent
SIZE = 64


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("PYTHONPATH", f"{HERE / 'fake'}:{HERE}")
    return monkeypatch


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x")
    return folder


def run_worker(tmp_path: Path, folder: Path, **case: Any) -> dict[str, Any]:
    job = {
        "case": cases.Case("bf16", **case).as_dict(),
        "folders": {"bf16": str(folder), "drafter-bf16": str(folder)},
        "vocabulary": SIZE,
        "reserved": 4,
        "share": 0.1,
        "lock": str(tmp_path / "lock"),
        "results": str(tmp_path / "result.json"),
        "tables": str(tmp_path / "tables.npz"),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "engine.worker", str(tmp_path / "job.json")]
    code = pool.run(command, tmp_path / "log", [0], 60)
    known: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    return known | {"exit_code": code}


def test_a_worker_records_every_part(fake: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    known = run_worker(tmp_path, model, drafter="bf16", timed=True)
    assert known["finished"]
    assert known["exit_code"] == 0
    assert known["acceptance_length"] == 3
    assert known["repeat_worst"] == 0
    assert known["reload_worst"] == 0
    rates = known["throughput"]
    assert len(rates["rounds"]) == worker.TIMED_ROUNDS
    for name in ("prefill_tokens_s", "decode_tokens_s"):
        assert 0 < min(each[name] for each in rates["rounds"]) <= rates[name]
        assert rates[name] in [each[name] for each in rates["rounds"]]
    with np.load(tmp_path / "tables.npz") as tables:
        shapes = [tables[name].shape for name in tables.files]
    assert shapes == [(length - 1, SIZE) for length in prompts.LENGTHS]


def test_what_is_compiled_at_first_is_not_timed(fake: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    fake.setenv("FAKE_VLLM", "compiles")
    for each in run_worker(tmp_path, model, timed=True)["throughput"]["rounds"]:
        assert max(each["first_token_s"], each["prefill_s"]) < 1


def test_a_round_in_which_the_machine_hesitates_takes_nothing_else_away(
    fake: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    fake.setenv("FAKE_VLLM", "hesitates")
    known = run_worker(tmp_path, model, timed=True)
    rounds = known["throughput"]["rounds"]
    slow = [each["first_token_s"] > each["generate_s"] and each["first_token_s"] >= 1 for each in rounds]
    assert slow == [i == 1 for i in range(worker.TIMED_ROUNDS)]
    for name in ("prefill_tokens_s", "decode_tokens_s"):
        assert 0 < known["throughput"][name] <= max(each[name] for i, each in enumerate(rounds) if i != 1)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 9), st.floats(0.01, 0.1), st.floats(0.2, 9)),
        min_size=worker.TIMED_ROUNDS,
        max_size=worker.TIMED_ROUNDS,
    )
)
def test_rates_are_those_of_the_round_in_the_middle(rounds: list[tuple[float, float, float]]) -> None:
    known = worker.rates(
        [dict(zip(("prefill_s", "first_token_s", "generate_s"), each, strict=True)) for each in rounds]
    )
    prefill, first, whole = (sorted(times)[worker.TIMED_ROUNDS // 2] for times in zip(*rounds, strict=True))
    assert known["prefill_tokens_s"] == pytest.approx(worker.TIMED_PROMPTS * worker.TIMED_LENGTH / prefill)
    generated = worker.TIMED_PROMPTS * (worker.TIMED_GENERATED - 1)
    assert known["decode_tokens_s"] == pytest.approx(generated / (whole - first))


def test_a_first_token_that_takes_longer_than_all_of_them_is_no_rate() -> None:
    with pytest.raises(RuntimeError, match=r"128 tokens took 0\.100 s, and the first alone 0\.200 s"):
        worker.rates([{"prefill_s": 1.0, "first_token_s": 0.2, "generate_s": 0.1}] * 3)


def test_who_measures_waits_for_who_runs_and_keeps_others_waiting(tmp_path: Path) -> None:
    runs, measures = Turns(tmp_path / "lock"), Turns(tmp_path / "lock")
    order = []

    def measure() -> None:
        with measures.alone():
            order.append("measures")
            time.sleep(0.3)
            order.append("measured")

    def start() -> None:
        runs.share()
        order.append("runs")

    runs.share()
    with ThreadPoolExecutor() as executor, contextlib.closing(runs), contextlib.closing(measures):
        measuring = executor.submit(measure)
        time.sleep(0.3)
        order.append("rests")
        runs.rest()
        while "measures" not in order and not measuring.done():
            time.sleep(0.01)
        executor.submit(start).result(30)
        measuring.result(30)
    assert order == ["rests", "measures", "measured", "runs"]


def test_a_turn_lasts_until_its_process_ends(fake: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = "from engine.turns import Turns; Turns(Path(sys.argv[1])).share(); print(1, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", f"import sys; from pathlib import Path; {code}", str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        assert process.stdout.readline() == b"1\n"
        with (tmp_path / "lock").open("w") as lock:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            process.stdin.close()
            process.wait(30)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_who_measures_gives_way_between_rounds(tmp_path: Path) -> None:
    order = []

    def measure(name: str) -> None:
        with contextlib.closing(Turns(tmp_path / "lock")) as turns:
            for _ in range(4):
                with turns.alone():
                    order.append(name)
                    time.sleep(0.3)

    first = Turns(tmp_path / "lock")
    first.share()
    with ThreadPoolExecutor() as executor:
        measuring = [executor.submit(measure, name) for name in ("one", "two")]
        time.sleep(0.1)
        first.close()
        for each in measuring:
            each.result(30)
    assert [len(list(same)) for _, same in itertools.groupby(order)] == [1] * 8


def test_a_reload_that_changes_numbers_is_seen(fake: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    fake.setenv("FAKE_VLLM", "forgets")
    assert run_worker(tmp_path, model)["reload_worst"] > 1


def test_a_model_that_does_not_load_is_recorded(fake: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    (model / "model.safetensors").unlink()
    known = run_worker(tmp_path, model)
    assert known["loads"] is False
    assert "no weights in" in known["load_error"]
    assert known["exit_code"] == 1
    assert "finished" not in known


def under_load(tmp_path: Path, model: Path) -> dict[str, Any]:
    job = {
        "arguments": {"model": str(model)},
        "gpus": [0],
        "results": str(tmp_path / "result.json"),
        "server_log": str(tmp_path / "server.log"),
        "lock": str(tmp_path / "lock"),
        "seconds": 4,
        "limit": 30,
        "vocabulary": SIZE,
        "reserved": 4,
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    assert pool.run([sys.executable, "-m", "engine.load", str(tmp_path / "job.json")], tmp_path / "log", [0], 90) == 0
    known: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    return known


def test_right_answers_under_load(fake: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    known = under_load(tmp_path, model)
    assert set(known["answers"]) == {"same"}
    assert known["answers"]["same"] > load.CLIENTS
    assert known["killed_while_streaming"]
    assert known["alive"]


@pytest.mark.parametrize(("fault", "word"), [("wrong", "wrong"), ("loses", "lost")])
def test_other_answers_under_load_are_seen(
    fake: pytest.MonkeyPatch, tmp_path: Path, model: Path, fault: str, word: str
) -> None:
    fake.setenv("FAKE_VLLM", fault)
    assert under_load(tmp_path, model)["answers"][word] > 0


def test_a_broken_checkpoint_ends_the_server_with_its_error(
    fake: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    (model / "model.safetensors").unlink()
    known = faults.give(sys.executable, {"model": str(model)}, [0], tmp_path / "log", 30)
    assert known["answers"] is False
    assert known["error"] == f"ValueError: no weights in {model}"
    assert known["ended_s"] < 30


def test_a_server_that_comes_up_with_a_broken_checkpoint_is_seen(
    fake: pytest.MonkeyPatch, tmp_path: Path, model: Path
) -> None:
    assert faults.give(sys.executable, {"model": str(model)}, [0], tmp_path / "log", 30)["answers"] is True


def test_a_server_that_hangs_is_seen_and_ended(fake: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"")
    known = faults.give(sys.executable, {"model": str(model)}, [0], tmp_path / "log", 4)
    assert known == {"answers": None, "hangs": True}


def test_leaving_a_server_ends_it(fake: pytest.MonkeyPatch, tmp_path: Path, model: Path) -> None:
    with serving(sys.executable, {"model": str(model)}, [0], tmp_path / "log") as server:
        assert server.wait(30)
    assert server.process.poll() is not None


def test_a_process_that_ignores_its_end_is_killed(tmp_path: Path) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(60)"
    )
    process = pool.start([sys.executable, "-c", stubborn], subprocess.PIPE, [0])
    assert process.stdout
    process.stdout.readline()
    start = time.monotonic()
    pool.end(process, patience=1)
    assert process.returncode == -9
    assert time.monotonic() - start < 10


def test_engines_share_gpus_no_further_than_said() -> None:
    gpus = pool.Gpus([0, 1], 2)
    running: list[int] = []
    most: list[int] = []

    def task(taken: list[int]) -> None:
        running.extend(taken)
        most.append(max(running.count(0), running.count(1)))
        time.sleep(0.02)
        for gpu in taken:
            running.remove(gpu)

    gpus.each([(1, task)] * 9 + [(2, task)] * 3)
    assert len(most) == 12
    assert max(most) <= 2


@pytest.mark.parametrize("gpus", [1, 2])
def test_engines_that_are_timed_come_last_and_one_of_a_kind_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int
) -> None:
    machine = {"capability": 9, "vllm": "0", "gpus": ["NVIDIA H200"] * gpus}
    monkeypatch.setattr(run, "machine", lambda: machine)
    numbers = ",".join(map(str, range(gpus)))
    options = run.options(["--out", str(tmp_path / "o.json"), "--work", str(tmp_path), "--gpus", numbers])
    measurement, ran = run.Run(options), []
    monkeypatch.setattr(measurement, "engine", lambda case, _: ran.append(case))
    monkeypatch.setattr(measurement, "load", lambda _: ran.append("load"))
    monkeypatch.setattr(measurement, "fault", lambda name, _: ran.append(name))
    stages = []
    for stage in measurement.stages():
        ran.clear()
        for _, work in stage:
            if work != measurement.exact:
                work([0])
        stages.append(list(ran))
    first, others, timed = stages
    assert len({(case.target, case.tp) for case in first}) == len(first)
    assert all(case.timed for case in timed)
    assert not any(case.timed for case in first)
    names = [each.name for each in (*first, *others, *timed) if isinstance(each, cases.Case)]
    left_out = set(measurement.results["left_out"])
    assert sorted([*names, *left_out]) == sorted(case.name for case in cases.CASES if case.tp <= gpus)
    assert {each for each in others if isinstance(each, str)} == {"load", *damage.FAULTS}


def test_an_engine_that_takes_too_long_is_told_from_one_that_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "machine", lambda: {"capability": 9, "vllm": "0", "gpus": ["NVIDIA H200"]})
    options = run.options(["--out", str(tmp_path / "o.json"), "--work", str(tmp_path), "--limit", "7"])
    measurement, case = run.Run(options), cases.CASES[0]
    for code, log, error in (
        (None, "still busy", "not done after 7 s, see --limit"),
        (None, "ValueError: no scale", "not done after 7 s, see --limit; ValueError: no scale"),
        (1, "ValueError: no scale", "ValueError: no scale"),
    ):
        (tmp_path / f"{case.name}.log").write_text(log)
        monkeypatch.setattr(measurement, "python", lambda *_, code=code: code)
        measurement.engine(case, [0])
        assert measurement.results["engines"][case.name]["error"] == error


def test_results_of_the_same_build_are_added_to(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "o.json"
    machine = {"capability": 9, "vllm": "0.27.1", "gpus": ["NVIDIA H200"]}
    known = {"machine": machine, "arguments": {}, "engines": {"bf16_tp1": {"loads": True}}, "load": {}}
    out.write_text(json.dumps(known))
    monkeypatch.setattr(run, "machine", lambda: machine)
    options = run.options(["--out", str(out), "--work", str(tmp_path)])
    assert run.Run(options).results["engines"] == {"bf16_tp1": {"loads": True}}
    others = run.options(["--out", str(out), "--work", str(tmp_path), "--argument", '{"moe_backend": "marlin"}'])
    with pytest.raises(SystemExit, match="holds results with other arguments: name another --out"):
        run.Run(others)
    monkeypatch.setattr(run, "machine", lambda: machine | {"vllm": "0.33.0"})
    with pytest.raises(SystemExit, match="holds results of another machine or build: name another --out"):
        run.Run(options)
    assert json.loads(out.read_text()) == known
    for other in ("no JSON", "[]", "{}"):
        out.write_text(other)
        with pytest.raises(SystemExit, match="holds no results: remove it, or name another --out"):
            run.Run(options)
        assert out.read_text() == other


def test_difference_finds_one_moved_token() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(5, SIZE))
    table = (logits - np.log(np.exp(logits).sum(-1, keepdims=True))).astype(np.float32)
    other = table.copy()
    prompt = [1, 2, 3, 4, 5, 6]
    other[3, prompt[4]] += 0.5
    found = compare.difference([other], [table], [prompt])
    assert found["worst"] == pytest.approx(0.5, rel=1e-5)
    assert found["mean"] == pytest.approx(0.1, rel=1e-5)
    assert found["positions"] == 5
    assert compare.difference([table], [table], [prompt])["kl"] == pytest.approx(0, abs=1e-6)


def test_a_prompt_of_one_token_has_nothing_to_compare() -> None:
    empty, table = np.zeros((0, SIZE), np.float32), np.full((1, SIZE), -np.log(SIZE), np.float32)
    assert compare.difference([empty, table], [empty, table], [[1], [1, 2]])["positions"] == 1


def test_continuations_that_part() -> None:
    one = [{"tokens": [1, 2, 3, 4], "logprobs": [-1.0, -1.0, -1.0, -1.0]}]
    two = [{"tokens": [1, 2, 9, 4], "logprobs": [-1.0, -1.5, -9.0, -9.0]}]
    assert compare.continuations(one, two) == {"same": 0, "of": 1, "agreed": 0.5, "worst": 0.5, "mean": 0.25}


ALONE = {"tokens": [1] * 10, "logprobs": [-1.0] * 10, "top": [{1: -1.0, 2: -1.4, 3: -4.0}] * 10, "reason": "length"}


@pytest.mark.parametrize(
    ("tokens", "logprobs", "word"),
    [
        ([1] * 10, [-1.0] * 10, "same"),
        ([1] * 10, [-1.2] * 10, "same"),
        ([1] * 10, [-1.3] * 10, "wrong"),  # everywhere a little further off than rounding is on average
        ([1] * 10, [-1.0] * 9 + [-2.4], "same"),
        ([1] * 10, [-1.0] * 9 + [-2.6], "wrong"),
        ([1] * 9 + [2], [-1.0] * 9 + [-1.35], "near"),
        ([1] * 9 + [3], [-1.0] * 9 + [-1.35], "wrong"),  # a candidate, but an unlikely one
        ([1] * 9 + [4], [-1.0] * 9 + [-1.35], "wrong"),  # no candidate at all
        ([2] + [9] * 9, [-3.0] * 10, "wrong"),
        ([2] + [9] * 9, [-1.5] + [-9.0] * 9, "near"),  # what follows answers another text
        ([1] * 9, [-1.0] * 9, "lost"),
    ],
)
def test_verdict(tokens: list[int], logprobs: list[float], word: str) -> None:
    assert load.verdict({"tokens": tokens, "logprobs": logprobs, "reason": "length"}, ALONE) == word


def test_an_answer_that_ends_otherwise_is_lost() -> None:
    assert load.verdict({**ALONE, "reason": "stop"}, ALONE) == "lost"


def test_arguments_are_merged_inside() -> None:
    ours = {"a": 1, "config": {"sizes": [1], "passes": {"x": True}}}
    theirs = {"config": {"passes": {"y": False}}, "b": 2}
    assert worker.merged(ours, theirs) == {"a": 1, "b": 2, "config": {"sizes": [1], "passes": {"x": True, "y": False}}}
    assert ours == {"a": 1, "config": {"sizes": [1], "passes": {"x": True}}}


def test_unknown_case_is_named() -> None:
    with pytest.raises(LookupError, match="no case is called nonsense"):
        cases.chosen(["nonsense"], 1)
    assert all(case.tp == 1 for case in cases.chosen([], 1))
    assert len({case.name for case in cases.CASES}) == len(cases.CASES)


def result(
    version: str, engines: dict[str, Any], faulty: dict[str, Any] | None = None, **arguments: Any
) -> dict[str, Any]:
    machine = {"vllm": version, "torch": "2.13.0", "gpus": ["NVIDIA H200"]}
    return {"machine": machine, "arguments": arguments, "engines": engines, "faults": faulty or {}, "load": {}}


def test_a_page_has_a_row_for_each_engine_and_a_column_for_each_build() -> None:
    right = {"loads": True, "finished": True, "to_exact": {"mean": 0.012, "worst": 0.3}, "acceptance_length": 3.5}
    wrong = {"loads": False, "error": "KeyError: 'scale'"}
    ends = {"answers": False, "hangs": False, "ended_s": 61.2, "loading_s": 3.0, "error": "ValueError: k_proj | x"}
    stock = result("0.27.1", {"mixed_tp1": wrong}, {"missing scale": {"answers": True, "hangs": False}})
    patched = result("0.27.1+k3.1", {"mixed_tp1": right, "mixed_drafter-nvfp4_tp2": right}, {"missing scale": ends})
    lines = report.page([stock, patched]).splitlines()
    assert "|  | 0.27.1 stock | 0.27.1 patched |" in lines
    assert "| `mixed` | does not load | 0.0120 / 0.300 |" in lines
    assert "| `mixed, drafter nvfp4, TP2` |  | 3.50 |" in lines
    assert report.described("mixed_drafter-mtp_tp1_fp8-cache") == "mixed, drafter mtp, FP8 cache"
    assert "| `missing scale` | **answers** | 61 s (3): ValueError: k_proj \\| x |" in lines


def test_a_page_tells_the_errors_and_what_builds_were_given() -> None:
    fails = {"bf16_tp1": {"loads": False, "error": "RuntimeError: cp_world_size | 1"}}
    runs = {"bf16_tp1": {"loads": True, "finished": True}}
    results = [result("0.27.1", fails), result("0.27.1", runs, attention_backend="FLASHMLA", cc={"fuse": False})]
    lines = report.page(results).splitlines()
    assert "| `bf16` | 0.27.1 stock | RuntimeError: cp_world_size \\| 1 |" in lines
    assert "|  | 0.27.1 stock | 0.27.1 stock, FLASHMLA |" in lines
    assert any('`{"attention_backend": "FLASHMLA", "cc": {"fuse": false}}`' in line for line in lines)


def test_a_warning_of_errors_that_may_come_is_none() -> None:
    log = (
        "(APIServer pid=1) WARNING 11-30 12:33:21 [system_utils.py:299] fd limit errors like `OSError: [Errno 24] Too"
        " many open files`.\n(EngineCore pid=2) ERROR 11-30 12:33:50 [core.py:1] ValueError: q_proj: no weight_scale\n"
    )
    assert faults.first_error(log) == "ValueError: q_proj: no weight_scale"


def test_a_page_shows_what_became_slower_beside_the_first_build() -> None:
    def engine(rate: int, rounds: tuple[int, ...]) -> dict[str, Any]:
        names = ("prefill_tokens_s", "decode_tokens_s")
        each = [dict.fromkeys(names, value) for value in rounds]
        return {"bf16_tp1": {"throughput": dict.fromkeys(names, rate) | {"rounds": each}}}

    first, second = engine(1000, (900, 1000, 1100)), engine(500, (505, 480, 500))
    lines = report.page([result("0.27.1", first), result("0.33.0", second)]).splitlines()
    assert lines.count("| `bf16` | 1,000 (1.00; 900 to 1,100) | 500 (0.50; 480 to 505) |") == 2


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 1000))
def test_blocks_under_powers_of_two(rows: int, columns: int, seed: int) -> None:
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    again = exact.rounded_blocks(matrix)
    for top in range(0, rows, 128):
        for left in range(0, columns, 128):
            block, found = matrix[top : top + 128, left : left + 128], again[top : top + 128, left : left + 128]
            # The smallest power of two that keeps the block within E4M3, whose elements have four significant bits.
            scale = 2.0 ** math.ceil(math.log2(float(block.abs().max()) / 448))
            stored = found / scale
            assert torch.equal(stored, stored.float().to(torch.float8_e4m3fn).double())
            bound = torch.maximum(block.abs() / 16, torch.tensor(scale * 2.0**-10, dtype=torch.float64))
            assert bool(((found - block).abs() <= bound).all())
