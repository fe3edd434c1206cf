"""Arguments that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

DeploymentPath = Annotated[
    Path, typer.Argument(metavar="DEPLOYMENT", help="The deployment file, for example examples/local.yaml.")
]
InstanceName = Annotated[
    str, typer.Argument(metavar="NAME", help="An instance's name in the deployment file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document in place of text.")]
