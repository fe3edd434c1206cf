"""A model of the Hugging Face hub: a branch is resolved once, and the deployment stays with that commit.

Files are in the hub library's own cache, which other programs share. The pin is a link at the deployment's place for
the model, to the folder of the commit in that cache; engines, gateway and tools see the files through it.
"""

import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from prfaas.core.bounded_file import MODEL_BYTES, file_json
from prfaas.core.deployment import ModelSource
from prfaas.core.units import format_bytes
from prfaas.serving.engines.fetching import FetchReport, ModelFetchError, folder_bytes
from prfaas.serving.engines.made_folder import locked

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_TEXTS = ("*.json", "tokenizer*", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py")
_SAFETENSORS = ("*.safetensors",)
# Only where there are no safetensors: these can run code when they are read.
_PICKLES = ("*.bin", "*.pt", "*.pth")
_INDEX = "model.safetensors.index.json"
_ANSWER_S = 30.0
_LOOK_EVERY_S = 0.2
_MOST_FILES = 10_000
# A file system that is full to the last byte stops more than this.
_SPARE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class _Revision:
    """A commit of a repository, and what is wanted of it."""

    commit: str
    sizes: dict[str, int]
    """Bytes by file."""


def hub_model(
    source: ModelSource, link: Path, report: FetchReport, *, weights: bool = True, update: bool = False
) -> None:
    """Make sure that `link` leads to the files of the commit that the deployment stays with.

    What is there already is not asked for again, so that a restart needs no network. Processes that ask at the same
    time wait for each other.

    Args:
        source: of the hub.
        link: the pin; made the first time.
        report: told what is fetched, and which commit a branch is at.
        weights: false where only configuration and tokenizer are needed.
        update: move on to the commit that the branch is at now.

    Raises:
        ModelFetchError: the hub has no such model or revision, does not give it to this machine, or can't be reached.
        OSError: the link or the cache can't be written.
    """
    if not update and _is_whole(link, weights):
        return
    link.parent.mkdir(parents=True, exist_ok=True)
    with locked(link.with_name(f".{link.name}.lock")):
        if not update and _is_whole(link, weights):
            return
        pinned = link.readlink().name if link.is_symlink() and not update else None
        with _in_one_sentence(source):
            revision = _resolved(source, pinned, weights)
            folder = _downloaded(source, revision, report)
        if not _is_whole(folder, weights):
            raise ModelFetchError(
                f"{source.name} at {revision.commit} has no config.json, or weights are missing"
            )
        before = link.readlink().name if link.is_symlink() else None
        _point(link, folder)
        if revision.commit not in (before, source.revision):
            report.notice(
                f"{source.name}: {source.revision or 'the default branch'} is {revision.commit}, which this deployment "
                "stays with; prfaas model fetch --update moves it on"
            )


def _is_whole(folder: Path, weights: bool) -> bool:
    """Whether everything is there. The hub's library puts a file into the folder when it has all of it."""
    if not (folder / "config.json").is_file():
        return False
    if not weights:
        return True
    try:
        shards = set(file_json(folder / _INDEX, MODEL_BYTES)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return any(path.is_file() for pattern in (*_SAFETENSORS, *_PICKLES) for path in folder.glob(pattern))
    return all((folder / str(shard)).is_file() for shard in shards)


def _point(link: Path, folder: Path) -> None:
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(folder)
    new.replace(link)


def _resolved(source: ModelSource, pinned: str | None, weights: bool) -> _Revision:
    """Which commit, and which files of it: one question to the hub."""
    from huggingface_hub import HfApi

    revision = pinned or source.revision
    info = HfApi(token=_token()).model_info(
        source.name, revision=revision, files_metadata=True, timeout=_ANSWER_S
    )
    names = [each.rfilename for each in info.siblings or ()]
    if info.sha is None or len(names) > _MOST_FILES:
        raise ModelFetchError(f"{source.name} has {len(names)} files on the hub; a checkpoint has fewer")
    wanted = set(_wanted(names, weights))
    return _Revision(info.sha, {name: size for name, size in _sizes(info) if name in wanted})


def _token() -> str | bool:
    """Only the environment is asked: what a person has logged in with is not a deployment's."""
    return os.environ.get("HF_TOKEN") or False


def _wanted(names: Sequence[str], weights: bool) -> Iterator[str]:
    """The files that vLLM needs of a checkpoint."""
    has_safetensors = any(fnmatch(name, pattern) for name in names for pattern in _SAFETENSORS)
    patterns = (*_TEXTS, *((_SAFETENSORS if has_safetensors else _PICKLES) if weights else ()))
    return (name for name in names if any(fnmatch(name, pattern) for pattern in patterns))


def _sizes(info: "ModelInfo") -> Iterator[tuple[str, int]]:
    for each in info.siblings or ():
        yield each.rfilename, each.size or 0


def _downloaded(source: ModelSource, revision: _Revision, report: FetchReport) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils.tqdm import disable_progress_bars

    storage = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=source.name, repo_type="model"))
    folder = storage / "snapshots" / revision.commit
    missing_bytes = sum(size for name, size in revision.sizes.items() if not (folder / name).is_file())
    _check_room(source, Path(constants.HF_HUB_CACHE), missing_bytes)
    disable_progress_bars()
    # Patterns, since the library knows no list of names: in these, brackets are signs of their own.
    names = [name.replace("[", "[[]") for name in revision.sizes]
    with _watched(storage / "blobs", missing_bytes, f"{source.name} at {revision.commit[:12]}", report):
        found = Path(
            snapshot_download(
                source.name,
                revision=revision.commit,
                allow_patterns=names,
                token=_token(),
            )
        )
    for name, size in revision.sizes.items():
        if not (found / name).is_file() or (found / name).stat().st_size != size:
            raise ModelFetchError(f"{name} of {source.name} has not the {size:,} bytes that the hub says")
    return found


def _check_room(source: ModelSource, cache: Path, missing_bytes: int) -> None:
    there = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free_bytes = shutil.disk_usage(there).free
    if missing_bytes and missing_bytes + _SPARE_BYTES > free_bytes:
        raise ModelFetchError(
            f"{source.name} needs {format_bytes(missing_bytes)} more in {cache}, where {format_bytes(free_bytes)} are "
            "free; HF_HOME names another place"
        )


@contextmanager
def _watched(blobs: Path, total_bytes: int, what: str, report: FetchReport) -> Iterator[None]:
    """Tell how much has come, by what is in the cache: the library has no callback that says it."""
    if not total_bytes:
        yield
        return
    before_bytes, ended = folder_bytes(blobs), threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOK_EVERY_S):
            report.fetched(what, min(folder_bytes(blobs) - before_bytes, total_bytes - 1), total_bytes)

    report.fetched(what, 0, total_bytes)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
    report.fetched(what, total_bytes, total_bytes)


@contextmanager
def _in_one_sentence(source: ModelSource) -> Iterator[None]:
    """Failures of the hub's library as `ModelFetchError`, each with what to do.

    Its HTTP library was another one in each of its last major versions: so whatever else it raises is taken for a hub
    that can't be reached, with its name and first line.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name, hub = source.name, constants.ENDPOINT
    try:
        yield
    except ModelFetchError:
        raise
    except OfflineModeIsEnabled as error:
        raise ModelFetchError(
            f"{name} is not whole in this machine's cache, and HF_HUB_OFFLINE keeps it from being fetched: fetch it "
            "where there is a network, or take HF_HUB_OFFLINE away"
        ) from error
    except GatedRepoError as error:
        raise ModelFetchError(
            f"{name} is given only to those who have agreed to its terms: do so at {hub}/{name}, and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelFetchError(
            f"{hub} has no {name}, or it is private: see model.hub, or set HF_TOKEN to a token that may read it"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelFetchError(f"{name} has no revision {source.revision}; see model.revision") from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise ModelFetchError(
                f"{hub} does not give {name} to this token ({status}); see HF_TOKEN"
            ) from error
        raise ModelFetchError(f"{hub} answers {status} for {name}; try again later") from error
    except Exception as error:
        first = (str(error).splitlines() or [""])[0][:200]
        raise ModelFetchError(
            f"{name} can't be fetched from {hub} ({type(error).__name__}: {first}); what has come is kept: try again, "
            "or bring the files to the cache and set HF_HUB_OFFLINE=1"
        ) from error
