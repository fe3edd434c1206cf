"""Named studies: many simulations around one question, and a page that answers it in numbers."""

from prfaas.studies.catalogue import STUDIES, conduct
from prfaas.studies.page import page_of
from prfaas.studies.setting import Setting, setting_of
from prfaas.studies.study import Section, Study

__all__ = ["STUDIES", "Section", "Setting", "Study", "conduct", "page_of", "setting_of"]
