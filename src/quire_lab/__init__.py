"""Plans, simulations, benchmarks and lessons, computed with the engine's own scheduler, cache and cost model.

plan      does a model fit, how fast would it be         sim        the cluster on a virtual clock
bench     load on a server or the engine; profiles       workload   when requests arrive and how long they are
diagnose  what limits a running server                   learn      lessons on how serving works
cockpit   the page: chat, live view, plans, lessons      cli        the commands of all of these
"""
