"""Named studies: many simulations around one question, and a page that answers it in numbers."""

from prfaas.lab.studies.ablation import ABLATION
from prfaas.lab.studies.agentic import AGENTIC
from prfaas.lab.studies.bandwidth import BANDWIDTH
from prfaas.lab.studies.burst import BURST
from prfaas.lab.studies.context import StudyContext, context_of
from prfaas.lab.studies.decode_price import DECODE_PRICE
from prfaas.lab.studies.dense_hybrid import DENSE_HYBRID
from prfaas.lab.studies.egress import EGRESS
from prfaas.lab.studies.equal_cost import EQUAL_COST
from prfaas.lab.studies.hit_rate import HIT_RATE
from prfaas.lab.studies.models import MODELS
from prfaas.lab.studies.page import page_of
from prfaas.lab.studies.pool import POOL
from prfaas.lab.studies.round_trip import ROUND_TRIP
from prfaas.lab.studies.scale import SCALE
from prfaas.lab.studies.shift import SHIFT
from prfaas.lab.studies.spot import SPOT
from prfaas.lab.studies.study import Study, StudySection, run_studies

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

__all__ = ["STUDIES", "Study", "StudyContext", "StudySection", "context_of", "page_of", "run_studies"]
