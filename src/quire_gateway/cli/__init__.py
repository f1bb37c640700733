"""The commands of `quire` that run a gateway; `quire.cli.table` names them."""
