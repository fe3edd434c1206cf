"""Python runs this at its start in engines that have the folder on their path: what they draft is written to a folder.

`TOLD_DRAFTS` names it. A line of a process's file: the ids that a request's answer has so far, and those drafted next.
"""

import json
import os
from pathlib import Path
from typing import Any

from changing import change_modules, is_engine, run_next


def _tell(module: Any) -> None:
    update = module.Scheduler.update_draft_token_ids

    def told(self: Any, drafts: Any) -> None:
        update(self, drafts)
        with Path(os.environ["TOLD_DRAFTS"], f"{os.getpid()}.jsonl").open("a") as file:
            for request_id, ids in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
                request = self.requests.get(request_id)
                if request is not None and not request.is_finished() and not request.is_prefill_chunk:
                    file.write(json.dumps([list(request.output_token_ids), list(ids)]) + "\n")

    module.Scheduler.update_draft_token_ids = told


if is_engine():
    change_modules({"vllm.v1.core.sched.scheduler": _tell})
    run_next(__file__)
