"""The numbers of the paper's tables, computed again beside the paper's, as a Markdown page."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from prfaas.core.arrays import np
from prfaas.core.deployment import load_planned
from prfaas.core.kv.layers import FullAttention, LinearState, SlidingWindow
from prfaas.core.kv.published import published_model
from prfaas.core.latency.files import load_profile
from prfaas.core.planner import make_plan, problem_of
from prfaas.core.shipped import example_path
from prfaas.core.units import BITS_PER_BYTE, MIB

if TYPE_CHECKING:
    from prfaas.core.planner import Plan


Kind = Literal["check", "derived", "fitted", "input"]
"""Independent of all that was put in or fitted; following from such; fitted to the paper; or the paper's own number."""
Relation = Literal["equal", "below", "order of"]

_MARKS = {"check": "**check**", "derived": "derived", "fitted": "fitted", "input": "input"}

TOLERANCE = 0.01
"""A larger deviation needs a reason."""


@dataclass(frozen=True, slots=True)
class ReproducedNumber:
    """One number of the paper, and ours."""

    key: str
    """TABLE/ROW/…, which reasons are found by."""
    label: str
    ours: float
    paper: float
    digits: int = 4
    """How many are shown."""
    reason: str | None = None
    """Why ours differs; it must be there where `is_off`."""
    kind: Kind = "check"
    """Whether anything of it went in."""
    because: str | None = None
    """What of it went in, unless it is a check."""
    says: Relation = "equal"
    """What the paper says of the number."""

    @property
    def deviation(self) -> float:
        """(ours − paper) / paper."""
        return self.ours / self.paper - 1

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return asdict(self) | {"deviation": self.deviation, "is_off": self.is_off}

    @property
    def is_off(self) -> bool:
        """True if ours is not what the paper says, by the numbers as they are, not as they are shown."""
        if self.says == "below":
            return self.ours >= self.paper
        if self.says == "order of":
            return not 10**-0.5 < self.ours / self.paper < 10**0.5
        return abs(self.deviation) > TOLERANCE


@dataclass(frozen=True, slots=True)
class ReproducedTable:
    """A table of the page with the text above it."""

    title: str
    text: str
    rows: Sequence[ReproducedNumber]


def unexplained(sections: Sequence[ReproducedTable]) -> list[ReproducedNumber]:
    """The numbers that differ by more than 1 % without a reason."""
    return [row for section in sections for row in section.rows if row.is_off and not row.reason]


_INTRO = """
Written by `prfaas reproduce --out docs/explanation/reproduction.md`, from the data files and `examples/paper.yaml`
that come with prfaas; don't edit. The paper is arXiv 2604.15039. A deviation is (ours − paper) / paper, taken before
rounding; the paper's three digits alone make up to 0.5 %. K is 1024.
"""


def reproduction_page(sections: Sequence[ReproducedTable]) -> str:
    """The page: per section a table, then what is no check, and each deviation above 1 % with its reason."""
    rows = [row for section in sections for row in section.rows]
    counts = {kind: sum(row.kind == kind for row in rows) for kind in get_args(Kind)}
    off = sum(row.is_off for row in rows if row.kind == "check")
    lines = [
        "# The paper's tables, computed again",
        "",
        _INTRO.strip(),
        "",
        _wrapped(
            f"Of {len(rows)} numbers {counts['check']} are independent checks: nothing that was fitted to the paper's "
            f"results goes into ours. Of these {counts['check'] - off} agree within 1 %, and {off} do not. The others "
            f"are no checks, and their deviations are in parentheses: {counts['input']} are inputs, the paper's own "
            f"numbers; {counts['fitted']} are fitted, ours was chosen so that they come out; and {counts['derived']} "
            "are derived from those. Whatever differs by more than 1 % is marked and explained."
        ),
    ]
    for section in sections:
        lines += ["", f"## {section.title}", "", _wrapped(section.text), ""]
        if section.rows:
            lines += ["| | ours | paper | deviation | is |", "|---|---:|---:|---:|---|"]
        lines += [_row(row) for row in section.rows]
        given = [(row.label, f"{row.kind}, {row.because}") for row in section.rows if row.because]
        if len(given) == len(section.rows) and len({reason for _, reason in given}) == 1:
            given = [("all", given[0][1])]
        if given:
            lines += ["", "No checks:", "", *_grouped(given)]
        off_here = [
            (f"{row.label} {_percent(row.deviation)}", row.reason or "**not explained**")
            for row in section.rows
            if row.is_off
        ]
        if off_here:
            lines += ["", "Deviations above 1 %:", "", *_grouped(off_here)]
    return "\n".join(lines) + "\n"


def _row(row: ReproducedNumber) -> str:
    mark = "**" if row.is_off else ""
    deviation = (
        f"{mark}{_percent(row.deviation)}{mark}" if row.says == "equal" else "no" if row.is_off else "holds"
    )
    if row.kind != "check":
        deviation = f"({deviation})"
    paper = (
        _shown(row.paper, row.digits)
        if row.says == "equal"
        else f"{row.says} {_shown(row.paper, row.digits)}"
    )
    return f"| {row.label} | {_shown(row.ours, row.digits)} | {paper} | {deviation} | {_MARKS[row.kind]} |"


def _percent(deviation: float) -> str:
    return f"{deviation:+.1%}" if abs(deviation) >= 0.0005 else "0.0%"


def _shown(value: float, digits: int) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"


def _grouped(told: Sequence[tuple[str, str]]) -> list[str]:
    """An item per reason, with all that it is the reason of."""
    by_reason: dict[str, list[str]] = {}
    for label, reason in told:
        by_reason.setdefault(reason, []).append(label)
    return [_wrapped(f"- {'; '.join(labels)}: {reason}", "  ") for reason, labels in by_reason.items()]


def _wrapped(text: str, indent: str = "") -> str:
    """Paragraphs at the width of the other pages; tables as they are."""
    blocks = text.strip().split("\n\n")
    return "\n\n".join(
        block
        if block.startswith("|")
        else textwrap.fill(block, 118, subsequent_indent=indent, break_on_hyphens=False)
        for block in blocks
    )


_GIGA = 1e9
_HYBRID_1T = "internal-1t"


def reproduced() -> list[ReproducedTable]:
    """All tables, by the plan of the paper's deployment."""
    return sections(make_plan(problem_of(load_planned(example_path("paper.yaml"))), "mean length"))


def paper_numbers() -> dict[str, Any]:
    """The paper's printed numbers, and the reasons where ours differ: `paper.yaml` beside this file."""
    import yaml

    text = (Path(__file__).parent / "paper.yaml").read_text(encoding="utf-8")
    numbers: dict[str, Any] = yaml.safe_load(text)
    return numbers


def sections(plan: "Plan") -> list[ReproducedTable]:
    """Tables 3, 5 and 6 and the numbers in the text, ours beside the paper's. `plan` is examples/paper.yaml's."""
    paper = paper_numbers()
    return [
        _table1(paper),
        _table2(paper),
        _table3(paper),
        _table5(paper),
        _table6(paper, plan),
        _claims(paper, plan),
    ]


def _table1(paper: Mapping[str, Any]) -> ReproducedTable:
    rows = []
    for name, printed in paper["table1"].items():
        layers = [0, 0]
        for group in published_model(name).kv_model.groups:
            layers[isinstance(group, FullAttention)] += group.layers
        label = f"{name}, layers of kind A for one of kind B"
        rows.append(_compare(paper, f"table1/{name}", label, layers[0] / layers[1], printed))
    return ReproducedTable(
        "Table 1: configurations",
        "Kind A keeps a state or a window, kind B all of a prompt. Counted from the published configurations; the "
        "internal model's is not published.",
        rows,
    )


# Of each kind of attention in Table 2 a model that has it, and what names its group of layers.
_KINDS = {
    "GQA": ("minimax-m2.5", FullAttention),
    "MLA": ("kimi-k2", FullAttention),
    "SWA": ("mimo-v2-flash", SlidingWindow),
    "Linear Attention": ("kimi-linear", LinearState),
}
_LONG_TOKENS = 131072


def _table2(paper: Mapping[str, Any]) -> ReproducedTable:
    lines = [
        "| | prefill latency | KV throughput | KVCache of a layer at 128K (MiB), ours |\n|---|---|---|---:|",
    ]
    for name, (latency, throughput) in paper["table2"].items():
        size = "–"
        if name in _KINDS:
            model, kind = _KINDS[name]
            groups = [each for each in published_model(model).kv_model.groups if isinstance(each, kind)]
            size = f"{groups[0].bytes_at(_LONG_TOKENS) / groups[0].layers / MIB:,.4g} ({model})"
        lines.append(f"| {name} | {latency} | {throughput} | {size} |")
    return ReproducedTable(
        "Table 2: kinds of attention",
        "The paper has words here, and no numbers, so nothing of it is counted. Beside them is what a layer of each "
        "kind keeps of a prompt of 128K tokens. It explains the right column, but for sparse attention: that computes "
        "so little that what it keeps comes fast.\n\n" + "\n".join(lines),
        [],
    )


def kv_throughput_gbps(model: str, profile: str, tokens: int) -> float:
    """Φ_kv (Eq. 1) in Gbit/s of a published model at a length."""
    size = published_model(model).kv_model.kv_bytes(tokens)
    return size * BITS_PER_BYTE / float(load_profile(profile).prefill_s(float(tokens))) / _GIGA


def _compare(
    paper: Mapping[str, Any],
    key: str,
    label: str,
    ours: float | None,
    printed: float,
    digits: int = 4,
    says: Relation = "equal",
) -> ReproducedNumber:
    assert ours is not None, key
    given: tuple[Kind, ...] = get_args(Kind)[1:]
    kinds = {each: text for each in given if (text := _told(paper[each], key)) is not None}
    # A number may be one thing within a table that is another: the longest key counts.
    kind: Kind = max(kinds, key=lambda each: _depth(paper[each], key), default="check")
    return ReproducedNumber(
        key,
        label,
        ours,
        printed,
        digits,
        reason=_told(paper["reasons"], key),
        kind=kind,
        because=kinds.get(kind),
        says=says,
    )


def _told(texts: Mapping[str, str], key: str) -> str | None:
    """The text of the key, or of the longest beginning of it that has one."""
    depth = _depth(texts, key)
    return " ".join(texts["/".join(key.split("/")[:depth])].split()) if depth else None


def _depth(texts: Mapping[str, str], key: str) -> int:
    """How many parts the longest beginning of the key has that has a text; 0: none has."""
    parts = key.split("/")
    return next((length for length in range(len(parts), 0, -1) if "/".join(parts[:length]) in texts), 0)


def _table3(paper: Mapping[str, Any]) -> ReproducedTable:
    table = paper["table3"]
    rows = []
    for model, printed in table["models"].items():
        for tokens, value in zip(table["lengths"], printed, strict=True):
            ours = kv_throughput_gbps(model, f"{model}-h200", tokens)
            key, label = f"table3/{model}/{tokens}", f"{model}, {tokens // 1024}K"
            rows.append(_compare(paper, key, label, ours, value, 4))
    return ReproducedTable(
        "Table 3: KV throughput (Gbit/s), 8 × H200",
        "Prefill times of these models are not printed. Ours are implied by this very table and the KVCache sizes "
        "that we count from each model's configuration (T = S_kv · 8 / Φ_kv), so agreement is by construction: it "
        "only says that sizes and profiles belong together. What can be judged is what went in and what came out: "
        "the sizes, and times that rise with length as they should.\n\n"
        + _implied(table["models"], table["lengths"]),
        rows,
    )


def _implied(models: Mapping[str, Any], lengths: Sequence[int]) -> str:
    at = [f"{tokens // 1024}K" for tokens in lengths]
    lines = [
        "| | "
        + " | ".join([f"S_kv, {each} (MiB)" for each in at] + [f"T, {each} (s)" for each in at])
        + " |",
        "|---|" + "---:|" * (2 * len(at)),
    ]
    for model in models:
        kv_model, profile = published_model(model).kv_model, load_profile(f"{model}-h200")
        sizes = [f"{kv_model.kv_bytes(tokens) / MIB:,.0f}" for tokens in lengths]
        times = [f"{float(profile.prefill_s(float(tokens))):.3f}" for tokens in lengths]
        lines.append(f"| {model} | " + " | ".join(sizes + times) + " |")
    return "\n".join(lines)


def _table5(paper: Mapping[str, Any]) -> ReproducedTable:
    table = paper["table5"]
    kv_model, profile = published_model(_HYBRID_1T).kv_model, load_profile(f"{_HYBRID_1T}-h200")
    rows = []
    for index, tokens in enumerate(table["lengths"]):
        at = f"{tokens // 1024}K"
        ours = {
            "kv_mib": (f"KVCache size, {at} (MiB)", kv_model.kv_bytes(tokens) / MIB),
            "prefill_s": (f"prefill, {at} (s)", float(profile.prefill_s(float(tokens)))),
            "kv_throughput_gbps": (
                f"KV throughput, {at} (Gbit/s)",
                kv_throughput_gbps(_HYBRID_1T, profile.name, tokens),
            ),
        }
        for column, (label, value) in ours.items():
            rows.append(_compare(paper, f"table5/{column}/{tokens}", label, value, table[column][index]))
    return ReproducedTable(
        "Table 5: the internal 1T model, 8 × H200",
        "Sizes are counted from the architecture that fits the printed ones (15 MLA and 42 KDA layers); prefill times "
        "are the table's own, through which our latency curve goes.",
        rows,
    )


_LABELS = {
    "threshold_tokens": "threshold t (tokens)",
    "n_prefill": "N_p",
    "n_decode": "N_d",
    "ttft_mean_s": "TTFT, mean (s)",
    "ttft_p90_s": "TTFT, P90 (s)",
    "theta_prfaas": "Θ PrfaaS (req/s)",
    "theta_pd_p": "Θ PD-P (req/s)",
    "theta_pd_d": "Θ PD-D (req/s)",
    "lambda_max": "Λ_max (req/s)",
}


def _table6(paper: Mapping[str, Any], plan: "Plan") -> ReproducedTable:
    table = paper["table6"]
    assert plan.naive is not None
    points = {
        "optimum": ("PrfaaS-PD", plan.optimum),
        "homogeneous": ("homogeneous PD", plan.homogeneous.point),
        "naive": ("naive heterogeneous", plan.naive.point),
    }
    rows = []
    for name, (title, point) in points.items():
        for field, value in table[name].items():
            label = f"{title}: {_LABELS[field]}"
            rows.append(_compare(paper, f"table6/{name}/{field}", label, getattr(point, field), value))
    naive, base = plan.naive.point.lambda_max, plan.homogeneous.point.lambda_max
    ratios = {
        "ratio_to_homogeneous": ("ratio to homogeneous PD", plan.ratio_to_homogeneous),
        "ratio_of_naive": ("ratio of naive to homogeneous PD", naive / base),
        "ratio_to_naive": ("ratio to naive", plan.ratio_to_naive),
    }
    for field, (label, ours) in ratios.items():
        rows.append(_compare(paper, f"table6/{field}", label, ours, table[field]))
    return ReproducedTable(
        "Table 6: the case study",
        "`prfaas plan examples/paper.yaml`. Five numbers are fitted, since the paper does not print what they follow "
        "from. The H20 latency curve is the parabola through three times that this table implies: Θ PD-P of the "
        "optimum, and Θ PD-P and P90 TTFT of homogeneous PD. The decode batch of 20 is that of Θ PD-D. Those agree by "
        "construction.\n\n"
        "The fifth is the round trip. Naive's two TTFTs are 78 ms above our prefill times: 1.74 − 1.662 s on "
        "average, 3.51 − 3.433 s at P90. At 100 Gbit/s 15 ms of that is the linear state, which can only leave when "
        "the prefill ends. The other 63 ms is the round trip in the file. The mean TTFT of PrfaaS-PD is not fitted: "
        "2.179 s of prefill and 0.496 crossings of 78 ms are 2.218 s. So the TTFTs say nothing against the cubic for "
        "H200; only naive's throughput does.",
        rows,
    )


def _claims(paper: Mapping[str, Any], plan: "Plan") -> ReproducedTable:
    claims, point, base = paper["claims"], plan.optimum, plan.homogeneous.point
    assert plan.naive is not None and base.ttft_mean_s and base.ttft_p90_s
    assert point.ttft_mean_s is not None and point.ttft_p90_s is not None
    threshold = float(paper["table6"]["optimum"]["threshold_tokens"])
    lengths = problem_of(load_planned(example_path("paper.yaml"))).workload.lengths
    share, tokens = (float(each[0]) for each in lengths.above(np.array([threshold])))
    long_s = float(load_profile(f"{_HYBRID_1T}-h200").prefill_s(tokens / share))
    single = {
        "mean_tokens": ("mean length (tokens)", lengths.mean()),
        "offloaded_fraction": ("offloaded fraction p, at t = 19.4K", share),
        "mean_long_tokens": ("mean offloaded length, at t = 19.4K (tokens)", tokens / share),
        "theta_prfaas": ("Θ PrfaaS, at t = 19.4K (req/s)", 4 / long_s),
        "egress_gbps": ("PrfaaS egress (Gbit/s)", point.egress_bits_per_s / _GIGA),
        "ttft_mean_saved": (
            "mean TTFT, less than homogeneous PD's",
            1 - point.ttft_mean_s / base.ttft_mean_s,
        ),
        "ttft_p90_saved": ("P90 TTFT, less than homogeneous PD's", 1 - point.ttft_p90_s / base.ttft_p90_s),
        "naive_below_optimum": (
            "naive, below PrfaaS-PD",
            1 - plan.naive.point.lambda_max / point.lambda_max,
        ),
        "equal_cost_ratio": ("gain at equal cost", plan.equal_cost_ratio),
    }
    rows = [
        _compare(paper, f"claims/{field}", label, ours, claims[field])
        for field, (label, ours) in single.items()
    ]
    for model, printed in claims["egress_512_gpus_gbps"].items():
        ours = 512 / 8 * kv_throughput_gbps(model, f"{model}-h200", 32768)
        label = f"egress of 512 H200, {model} at 32K (Gbit/s)"
        rows.append(_compare(paper, f"claims/egress_512_gpus_gbps/{model}", label, ours, printed))
    ours = 10000 / 8 * kv_throughput_gbps("ring-2.5-1t", "ring-2.5-1t-h200", 131072)
    label = "egress of 10,000 GPUs, ring-2.5-1t at 128K (Gbit/s)"
    printed = claims["egress_10000_gpus_gbps"]
    rows.append(_compare(paper, "claims/egress_10000_gpus_gbps", label, ours, printed))
    bounds: tuple[tuple[str, str, float, Relation], ...] = (
        (
            "ring_512_gpus_128k_gbps",
            "egress of 512 H200, ring-2.5-1t at 128K (Gbit/s)",
            512 / 8 * kv_throughput_gbps("ring-2.5-1t", "ring-2.5-1t-h200", 131072),
            "below",
        ),
        (
            "egress_3000_gpus_gbps",
            "egress of 3,000 PrfaaS GPUs as in the case study (Gbit/s)",
            3000 / 32 * point.egress_bits_per_s / _GIGA,
            "order of",
        ),
    )
    rows += [
        _compare(paper, f"claims/{field}", label, value, claims[field], says=says)
        for field, label, value, says in bounds
    ]
    gbps = {model: kv_throughput_gbps(model, f"{model}-h200", 32768) for model in paper["table3"]["models"]}
    ring = published_model("ring-2.5-1t")
    full_layers = sum(each.layers for each in ring.kv_model.groups if isinstance(each, FullAttention))
    in_text = {
        "kv_throughput_ratio_minimax_mimo": (
            "KV throughput at 32K, minimax-m2.5 over mimo-v2-flash",
            gbps["minimax-m2.5"] / gbps["mimo-v2-flash"],
        ),
        "kv_throughput_ratio_qwen": (
            "KV throughput at 32K, qwen3-235b over qwen3.5-397b",
            gbps["qwen3-235b"] / gbps["qwen3.5-397b"],
        ),
        # Grouped-query attention of 8 heads of 128, two bytes each for key and value, in every layer.
        "mla_saving": (
            "ring-2.5-1t, KVCache per token of an MLA layer against GQA",
            2 * 8 * 128 * 2 * full_layers / ring.kv_model.token_bytes,
        ),
        "hybrid_saving": ("ring-2.5-1t, layers over MLA layers", ring.layers / full_layers),
        "ring_kv_saving": (
            "ring-2.5-1t, KVCache per token against GQA in all layers",
            ring.layers * 2 * 8 * 128 * 2 / ring.kv_model.token_bytes,
        ),
    }
    for field, (label, value) in in_text.items():
        rows.append(_compare(paper, f"claims/{field}", label, value, claims[field]))
    return ReproducedTable(
        "Numbers in the text",
        "Sections 2.2, 2.3 (Eq. 2, by `prfaas bandwidth`), 4.1, 4.3 and 4.4. Three follow from the paper's own "
        "threshold, so that nothing fitted is in them.",
        rows,
    )
