"""The `prfaas` command."""
