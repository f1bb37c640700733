"""Answers from formulas: does a model fit, how fast would it be, what would it cost. No torch and no clock.

estimate     TTFT, TPOT, throughput and cost        advice         how to cut a model, and why
capacity     all of it for one question             explain        the figures with their formulas
replica      one replica, for an autoscaler         candidates     the ways to cut a model that are compared
"""
