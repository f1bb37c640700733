"""The ops that a model is made of. One folder an op: a contract, a reference beside it, faster versions later."""
