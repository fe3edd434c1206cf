"""Named studies: many simulations around one question, and a page that answers it in numbers."""

from prfaas.lab.studies.page import STUDIES, conduct, page_of
from prfaas.lab.studies.setup import Setting, setting_of
from prfaas.lab.studies.study import Section, Study

__all__ = ["STUDIES", "Section", "Setting", "Study", "conduct", "page_of", "setting_of"]
