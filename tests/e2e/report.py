#!/usr/bin/env python3
"""Make a page of what `run.py` measured with one or more builds of vLLM.

    python tests/e2e/report.py results/*.json --out results/README.md [--plot results/NAME.svg]

The first results with a timed BF16 engine are those that throughput is compared with.  The plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Result = dict[str, Any]
# Of results' ``expected``: the mean difference that these roundings alone make.
EXPECTED = {
    "bf16": "rounding: BF16",
    "activations": "rounding: and E4M3 activations",
    "power_of_two": "rounding: and weights, by DeepGEMM",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def label(result: Result) -> str:
    """A build, and what it was told to use by a word."""
    version = result["machine"]["vllm"]
    words = [value for value in result["arguments"].values() if isinstance(value, str)]
    return ", ".join([f"{version.split('+')[0]} {'patched' if '+k3' in version else 'stock'}", *words])


def names(results: Sequence[Result], part: str) -> list[str]:
    """Every name that any result has, in the order of the first that has it."""
    return list(dict.fromkeys(name for result in results for name in result[part]))


def described(name: str) -> str:
    """A case's name as a reader says it."""
    words = name.replace("_tp1", "").replace("fp8_pb_wo", "FP8-PB-WO").split("_")
    kept = [re.sub(r"^tp(?=\d)", "TP", word).replace("fp8-cache", "FP8 cache") for word in words]
    return ", ".join(kept).replace("drafter-", "drafter ").replace("FP8-PB-WO", "FP8_PB_WO")


def across(
    results: Sequence[Result], part: str, cell: Callable[[Result], str], wanted: Sequence[str] | None = None
) -> str:
    """A row for each name, a column for each build; nothing where that build was not run."""
    rows = []
    for name in wanted if wanted is not None else names(results, part):
        cells = [cell(result[part][name]) if name in result[part] else "" for result in results]
        if any(cells):
            rows.append([f"`{described(name)}`" if part == "engines" else f"`{name}`", *cells])
    return table(["", *map(label, results)], rows) if rows else "Not measured.\n"


def loads(known: Result) -> str:
    if not known.get("loads"):
        return "does not load"
    return "runs" if known.get("finished") else "loads, then fails"


def moved(which: str) -> Callable[[Result], str]:
    def cell(known: Result) -> str:
        if which not in known:
            return loads(known) if not known.get("finished") else ""
        found = known[which]
        return f"{found['mean']:.4f} / {found['worst']:.3f}"

    return cell


def rate(field: str, base: float | None) -> Callable[[Result], str]:
    def cell(known: Result) -> str:
        rates = known.get("throughput", {})
        if field not in rates:
            return ""
        rounds = [each[field] for each in rates["rounds"]]
        beside = f"{rates[field] / base:.2f}; " if base else ""
        return f"{rates[field]:,.0f} ({beside}{min(rounds):,.0f} to {max(rounds):,.0f})"

    return cell


def acceptance(known: Result) -> str:
    value = known.get("acceptance_length")
    return f"{value:.2f}" if value else ("" if known.get("finished") else loads(known))


def reloaded(known: Result) -> str:
    if "reload_worst" not in known:
        return known.get("reload_error", "")[:60]
    return " / ".join(f"{known[name]:.3f}" for name in ("repeat_worst", "reload_worst") if name in known)


def cut(error: str | None) -> str:
    return (error or "no error").replace("|", "\\|")[:260]


def fault(known: Result) -> str:
    if known["answers"]:
        return "**answers**"
    if known["hangs"]:
        return "**hangs**"
    return f"{known['ended_s']:.0f} s ({known['loading_s'] or 0:.0f}): {cut(known['error'])}"


def load(known: Result) -> str:
    if "answers" not in known:
        return str(known.get("error", "does not start"))[:160]
    return ", ".join(f"{number} {word}" for word, number in sorted(known["answers"].items()))


def given(result: Result) -> str:
    return f", `{json.dumps(result['arguments'])}`" if result["arguments"] else ""


def errors(results: Sequence[Result]) -> list[list[str]]:
    """A row for each engine that did not end by itself."""
    return [
        [f"`{described(name)}`", label(result), cut(result["engines"][name].get("error"))]
        for name in names(results, "engines")
        for result in results
        if name in result["engines"] and not result["engines"][name].get("finished")
    ]


def page(results: Sequence[Result]) -> str:
    first = results[0]["machine"]
    engines = names(results, "engines")
    drafted = [name for name in engines if "drafter" in name]
    timed = [result["engines"].get("bf16_tp1", {}).get("throughput") for result in results]
    base: dict[str, float] = next(filter(None, timed), {})
    gpus = ", ".join(dict.fromkeys(first["gpus"]))
    parts = [
        "<!-- written by tests/e2e/report.py -->\n",
        f"GPUs: {len(first['gpus'])} x {gpus}. "
        + "; ".join(f"{label(r)}: torch {r['machine']['torch']}{given(r)}" for r in results)
        + ".\n",
        "### Log-probabilities, beside float64\n",
        "Mean / worst difference in nats of the log-probability of each next token of the fixed prompts, to a float64\n"
        "computation of the model from the checkpoint's own (dequantized) weights.\n",
        across(results, "engines", moved("to_exact")),
        "### Beside the same vLLM with the reference in BF16\n",
        across(results, "engines", moved("to_reference")),
        "### Errors\n",
        table(["", "build", "error"], errors(results)),
        "### Acceptance length\n",
        across(results, "engines", acceptance, drafted),
        "### Throughput, tokens a second\n",
        "Medians of rounds; in brackets beside the first timed `bf16`, and the slowest and the fastest round.\n",
        "Prefill:\n",
        across(results, "engines", rate("prefill_tokens_s", base.get("prefill_tokens_s"))),
        "Decode:\n",
        across(results, "engines", rate("decode_tokens_s", base.get("decode_tokens_s"))),
        "### After a weight reload\n",
        "The worst difference of a log-probability between two runs without a reload / before and after one.\n",
        across(results, "engines", reloaded),
        "### Broken checkpoints\n",
        "Seconds until `vllm serve` ended (of them since it began to load), and its error.\n",
        across(results, "faults", fault),
        "### Load\n",
        table(["", "answers"], ([label(result), load(result["load"])] for result in results if result["load"])),
    ]
    return "\n".join(parts)


def plot(results: Sequence[Result], path: Path) -> None:
    """Mean difference to float64 of each engine, a bar for each build, and lines for what roundings explain."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "k3"
    from matplotlib import pyplot

    wanted = [
        name for name in names(results, "engines") if any("to_exact" in r["engines"].get(name, {}) for r in results)
    ]
    shown = [result for result in results if any("to_exact" in known for known in result["engines"].values())]
    figure, axes = pyplot.subplots(figsize=(9, 0.5 + 0.45 * len(wanted)))
    height = 0.8 / len(shown)
    for i, result in enumerate(shown):
        values = [result["engines"].get(name, {}).get("to_exact", {}).get("mean", 0) for name in wanted]
        axes.barh([y + i * height for y in range(len(wanted))], values, height, label=label(result))
    axes.set_yticks([y + 0.4 - height / 2 for y in range(len(wanted))], [described(name) for name in wanted])
    axes.invert_yaxis()
    for (name, what), style in zip(EXPECTED.items(), ("dotted", "dashed", "dashdot"), strict=True):
        axes.axvline(shown[0]["expected"][name]["mean"], color="black", linewidth=1, linestyle=style, label=what)
    axes.set_xlabel("mean difference of log-probability to float64, nats")
    axes.legend()
    axes.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True, help="the page, Markdown")
    parser.add_argument("--plot", type=Path, help="the plot, SVG")
    options = parser.parse_args()
    results = [json.loads(path.read_text()) for path in options.results]
    options.out.write_text(page(results))
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
