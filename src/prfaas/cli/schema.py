"""`prfaas schema`: the deployment file for editors."""

from prfaas.cli.common import print_json


def schema() -> None:
    """Print the JSON Schema of deployment files, by which editors complete them and mark mistakes.

    Editors with a YAML language server take it from a first line in the file:
    # yaml-language-server: $schema=prfaas.schema.json

    Example: prfaas schema > prfaas.schema.json
    """
    from prfaas.core.deployment.schema import json_schema

    print_json(json_schema())
