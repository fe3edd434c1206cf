"""The numbers of the paper's tables, computed again beside the paper's, as a Markdown page."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prfaas.core.deployment import load_planned
from prfaas.core.deployment.examples import example_path
from prfaas.core.kv import published_model
from prfaas.core.latency import load_profile
from prfaas.core.planner import make_plan, problem_of
from prfaas.core.units import BITS_PER_BYTE, MIB

if TYPE_CHECKING:
    from prfaas.core.planner import Plan


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
    """Why ours differs; it must be there beyond `TOLERANCE`."""
    by_construction: str | None = None
    """Why ours could hardly differ: what of it was chosen so that the paper's comes out. None: it is a check."""

    @property
    def deviation(self) -> float:
        """(ours − paper) / paper."""
        return self.ours / self.paper - 1

    def to_json(self) -> dict[str, Any]:
        """Plain numbers and strings."""
        return asdict(self) | {"deviation": self.deviation}

    @property
    def is_off(self) -> bool:
        """True beyond the tolerance, by the numbers as they are, not as they are shown."""
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
    checks = [row for row in rows if row.by_construction is None]
    off = sum(row.is_off for row in checks)
    lines = [
        "# The paper's tables, computed again",
        "",
        _INTRO.strip(),
        "",
        _wrapped(
            f"{len(rows) - len(checks)} of {len(rows)} numbers are given by construction, so they are no check: what "
            "goes into ours was chosen so that they come out, or they follow from such ones by arithmetic. Their "
            f"deviations are in parentheses. Of the other {len(checks)} numbers {len(checks) - off} agree within 1 %, "
            f"and {off} do not. Whatever differs by more than that is marked and explained."
        ),
    ]
    for section in sections:
        lines += ["", f"## {section.title}", "", _wrapped(section.text), ""]
        lines += ["| | ours | paper | deviation |", "|---|---:|---:|---:|"]
        lines += [_row(row) for row in section.rows]
        given = [(row.label, row.by_construction) for row in section.rows if row.by_construction]
        if len(given) == len(section.rows) and len({reason for _, reason in given}) == 1:
            given = [("all", given[0][1])]
        if given:
            lines += ["", "By construction:", "", *_grouped(given)]
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
    deviation = f"{mark}{_percent(row.deviation)}{mark}"
    if row.by_construction:
        deviation = f"({deviation})"
    return f"| {row.label} | {_shown(row.ours, row.digits)} | {_shown(row.paper, row.digits)} | {deviation} |"


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
    return [_table3(paper), _table5(paper), _table6(paper, plan), _claims(paper, plan)]


def kv_throughput_gbps(model: str, profile: str, tokens: int) -> float:
    """Φ_kv (Eq. 1) in Gbit/s of a published model at a length."""
    size = published_model(model).kv_model.kv_bytes(tokens)
    return size * BITS_PER_BYTE / float(load_profile(profile).prefill_s(float(tokens))) / _GIGA


def _compare(
    paper: Mapping[str, Any], key: str, label: str, ours: float | None, printed: float, digits: int = 4
) -> ReproducedNumber:
    assert ours is not None, key
    return ReproducedNumber(
        key,
        label,
        ours,
        printed,
        digits,
        reason=_told(paper["reasons"], key),
        by_construction=_told(paper["by_construction"], key),
    )


def _told(texts: Mapping[str, str], key: str) -> str | None:
    """The text of the key, or of the longest beginning of it that has one."""
    parts = key.split("/")
    beginnings = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((" ".join(texts[each].split()) for each in beginnings if each in texts), None)


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
    claims, point = paper["claims"], plan.optimum
    single = {
        "offloaded_fraction": ("offloaded fraction p", point.offloaded_fraction),
        "mean_long_tokens": ("mean offloaded length (tokens)", point.mean_long_tokens),
        "egress_gbps": ("PrfaaS egress (Gbit/s)", point.egress_bits_per_s / _GIGA),
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
    gbps = {model: kv_throughput_gbps(model, f"{model}-h200", 32768) for model in paper["table3"]["models"]}
    ring = published_model("ring-2.5-1t")
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
        "ring_kv_saving": (
            "ring-2.5-1t, KVCache per token against GQA in all layers",
            ring.layers * 2 * 8 * 128 * 2 / ring.kv_model.token_bytes,
        ),
    }
    for field, (label, value) in in_text.items():
        rows.append(_compare(paper, f"claims/{field}", label, value, claims[field]))
    return ReproducedTable(
        "Numbers in the text",
        "Sections 2.2, 2.3 (Eq. 2, by `prfaas bandwidth`), 4.3 and 4.4.",
        rows,
    )
