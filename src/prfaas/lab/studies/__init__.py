"""Studies: many simulations around one question, and a page that answers it in numbers.

This is what they are made of. The project's own are in `studies/` of a checkout.
"""

from prfaas.lab.studies.context import StudyContext, context_of
from prfaas.lab.studies.page import page_of
from prfaas.lab.studies.study import Study, StudySection, run_studies

__all__ = ["Study", "StudyContext", "StudySection", "context_of", "page_of", "run_studies"]
