"""The project's own studies of the scheduler: each a question, many simulations, and what they say.

`prfaas study NAME` carries one out. A study of your own is a file like these in a folder of this form; the files
`_figures.py`, `_repeats.py`, `_traffic.py` and `_variants.py` are what several of them share.
"""

from studies.ablation import ABLATION
from studies.agentic import AGENTIC
from studies.bandwidth import BANDWIDTH
from studies.burst import BURST
from studies.decode_price import DECODE_PRICE
from studies.dense_hybrid import DENSE_HYBRID
from studies.egress import EGRESS
from studies.equal_cost import EQUAL_COST
from studies.hit_rate import HIT_RATE
from studies.models import MODELS
from studies.pool import POOL
from studies.round_trip import ROUND_TRIP
from studies.scale import SCALE
from studies.shift import SHIFT
from studies.spot import SPOT

STUDIES = {
    study.name: study
    for study in (
        EQUAL_COST,
        ABLATION,
        BANDWIDTH,
        BURST,
        SHIFT,
        HIT_RATE,
        POOL,
        SCALE,
        EGRESS,
        DECODE_PRICE,
        ROUND_TRIP,
        AGENTIC,
        MODELS,
        DENSE_HYBRID,
        SPOT,
    )
}
"""By name, in the order of the page."""
