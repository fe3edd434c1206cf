"""Known holes in the packages of this environment, by pip-audit in an environment of its own.

`make audit`. It ends with 0 if there are none, with 1 if there are, and with 2 where the service that knows them can't
be asked.
"""

import json
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path


def main() -> int:
    """Print what was found."""
    with tempfile.TemporaryDirectory(prefix="prfaas-audit-") as directory:
        venv.create(directory, with_pip=True)
        python = str(Path(directory, "bin", "python"))
        installed = subprocess.run(
            [python, "-m", "pip", "install", "-q", "pip-audit"], capture_output=True, text=True, timeout=900
        )
        if installed.returncode != 0:
            return _not_asked("pip-audit can't be installed", installed.stderr)
        packages = sysconfig.get_path("purelib")
        command = [python, "-m", "pip_audit", "--path", packages, "-f", "json", "--progress-spinner", "off"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return _not_asked("the service of known holes does not answer", done.stderr)
    holes = [(each, hole) for each in found for hole in each.get("vulns", ())]
    for each, hole in holes:
        print(
            f"{each['name']} {each['version']}: {hole['id']}, mended in {', '.join(hole['fix_versions']) or 'none'}"
        )
    passed_over = [each["name"] for each in found if "skip_reason" in each]
    if len(passed_over) == len(found):
        return _not_asked(
            "the service knows none of the packages", found[0].get("skip_reason", "") if found else ""
        )
    print(f"{len(found) - len(passed_over)} packages looked up, {len(holes)} known holes", end="")
    print(f"; not known there: {', '.join(passed_over)}" if passed_over else "")
    return 1 if holes else 0


def _not_asked(sentence: str, detail: str) -> int:
    last = detail.strip().splitlines()[-1:] or [""]
    print(f"not audited: {sentence} ({last[0][:300]})", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
