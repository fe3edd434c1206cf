"""Profile files: read, written, and wrong."""

from pathlib import Path

import pytest

from prfaas.core.latency.files import load_profile, parse_profile, profile_names, profile_text, save_profile
from prfaas.core.latency.profile import ProfileError

GOOD = """\
name: mine
model: any
hardware: h20
gpus_per_instance: 8
source: a test
prefill:
  interpolation: monotone
  points: [[128, 0.1], [1024, 0.5]]
decode:
  points: [[1, 0.01], [8, 0.02]]
"""


@pytest.mark.parametrize("name", profile_names())
def test_a_saved_profile_is_read_again(name: str, tmp_path: Path) -> None:
    profile = load_profile(name)
    path = tmp_path / "copy.yaml"
    save_profile(profile, path)
    assert load_profile(path) == profile
    assert load_profile("copy.yaml", relative_to=tmp_path) == profile
    assert load_profile(str(path), relative_to=Path("elsewhere")) == profile


def test_reads_a_file() -> None:
    profile = parse_profile(GOOD, "p.yaml")
    assert (profile.name, profile.hardware, profile.gpus_per_instance) == ("mine", "h20", 8)
    assert profile.max_batch(0.02) == 8
    assert parse_profile(profile_text(profile), "q.yaml") == profile


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: mine\n", "", "p.yaml:1: name: is missing"),
        ("hardware:", "hardwear:", "p.yaml:3: hardwear: is no known field"),
        ("instance: 8", "instance: 0", "p.yaml:4: gpus_per_instance: input should be greater than 0"),
        ("instance: 8", "instance: x", "p.yaml:4: gpus_per_instance: input should be a valid integer"),
        (
            "monotone",
            "spline",
            "p.yaml:7: prefill.interpolation: input should be 'linear', 'cubic' or 'monotone'",
        ),
        ("  interpolation: monotone\n", "", "p.yaml:6: prefill: interpolation is missing"),
        ("[128, 0.1]", "[128]", "p.yaml:8: prefill.points[0][1]: is missing"),
        ("[128, 0.1]", "[128, -1]", "p.yaml:8: prefill.points[0][1]: input should be greater than 0"),
        ("[128, 0.1]", "[128, .inf]", "p.yaml:8: prefill.points[0][1]: input should be a finite number"),
        ("[128, 0.1]", "[2048, 0.1]", "p.yaml:6: prefill: points must ascend; 1024 comes after 2048"),
        ("[[128, 0.1], [1024, 0.5]]", "[[128, 0.1]]", "p.yaml:8: prefill.points: "),
        (
            "decode:\n",
            "  range_tokens: [1, 1024]\ndecode:\n",
            "p.yaml:6: prefill: the range [1, 1024] is wider",
        ),
        ("decode:\n", "  polynomial: [1]\ndecode:\n", "p.yaml:6: prefill: give either points or polynomial"),
        ("[8, 0.02]", "[1, 0.02]", "p.yaml:9: decode: points must ascend"),
        ("source: a test", "source: [", "is no valid YAML"),
        (GOOD, "just text", "p.yaml:1: must be a mapping"),
        (GOOD, "", "p.yaml: must be a mapping"),
    ],
)
def test_mistakes_are_named(old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(ProfileError) as raised:
        parse_profile(GOOD.replace(old, new), "p.yaml")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_polynomial_says_where_it_holds() -> None:
    head = GOOD[: GOOD.index("prefill:")] + "prefill:\n  polynomial: [0.1, 0.001]\n"
    with pytest.raises(ProfileError, match="range_tokens is missing; a polynomial holds"):
        parse_profile(head, "p.yaml")
    with pytest.raises(ProfileError, match="interpolation goes with points"):
        parse_profile(head + "  interpolation: cubic\n  range_tokens: [1, 2]\n", "p.yaml")
    assert parse_profile(head + "  range_tokens: [100, 200]\n", "p.yaml").prefill_s(100) == pytest.approx(0.2)


def test_names_and_paths(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match='no profile "internal-1t-h2000"; did you mean "internal-1t-h200"'):
        load_profile("internal-1t-h2000")
    with pytest.raises(ProfileError, match='no profile "x"; there are internal-1t-h20, '):
        load_profile("x")
    with pytest.raises(ProfileError, match=r"gone\.yaml: there is no such profile file"):
        load_profile("gone.yaml", relative_to=tmp_path)
    with pytest.raises(ProfileError, match="can't be read as a profile"):
        load_profile(tmp_path)
