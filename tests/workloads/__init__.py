"""How the packaged workloads were made: tools to run by hand when a data set or an engine's costs change.

``scale_rates`` finds the constants in ``ops.simulator.rates``; ``pack``, ``week`` and ``shared_docs`` write the data files.
"""
