"""The commands of `quire` that plan, simulate, measure, teach and show; `quire.cli.table` names them."""
