"""What an engine's metrics tell about its cache."""

from prfaas.gateway.prefixes import cache_facts

SERIES = b"vllm:cache_config_info{%s} 1.0\n"


def test_facts_are_found_among_other_series_and_labels() -> None:
    told = b'# TYPE vllm:cache_config_info gauge\nother{x="1"} 2\n' + SERIES % (
        b'_block_size_resolved="True",block_size="528",mamba_block_size="16",kv_cache_size_tokens="1001624"'
    )
    assert cache_facts(told) == (528, 1001624)


def test_what_is_not_told_is_not_known() -> None:
    assert cache_facts(b"") == (None, None)
    assert cache_facts(SERIES % b'block_size="None",kv_cache_size_tokens="-3"') == (None, None)
