"pagedlm: LLM serving you can read. Names load on first use, so that importing the package loads no heavy library."
__version__ = "0.0.1"

import importlib

_homes = {
    'core': 'Request SamplingParams Sequence Status Plan Chunk NewSequence StepResult Output Outputs Grant Usage '
            'PagedLMError ConfigError InvalidRequestError RequestTooLargeError DuplicateRequestError BlockError SchedulerError DeadlockError '
            'ModelNotFoundError',
    'trace': 'Trace Event',
    'memory.block_allocator': 'BlockAllocator',
    'memory.block_table': 'BlockTable',
    'memory.block_manager': 'BlockManager check_pool check_plan',
    'memory.prefix_cache': 'PrefixCache',
    'memory.contiguous': 'ContiguousMemory',
    'scheduling.beam_search': 'BeamSearch',
    'scheduling.policies': 'Policy policies register_policy',
    'scheduling.scheduler': 'Scheduler',
    'scheduling.engine': 'Engine ScriptedExecutor',
    'scheduling.cost_model': 'CostModel Roofline',
    'scheduling.workloads': 'Workload',
    'scheduling.simulator': 'System simulate',
    'compute.runner': 'ModelRunner',
    'compute.cuda_graphs': 'GraphRunner',
    'serving.llm': 'LLM RequestOutput CompletionOutput Score',
    'figures.batch': 'plot_batch compare',
    'figures.sharing': 'plot_sharing',
    'figures.usage': 'plot_usage plot_waste plot_latency',
    'figures.rerun': 'rerun one_more_block',
    'figures.who_held': 'who_held',
    'figures.why': 'why',
    'figures.frames': 'film',
    'figures.paging': 'plot_memory plot_paging plot_timelines plot_step_time compare_memory',
    'figures.player': 'player',
    'figures.explorer': 'Explorer Session',
}
_home = {name: module for module, names in _homes.items() for name in names.split()}
__all__ = sorted(_home)


def __getattr__(name):
    if name not in _home: raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    value = getattr(importlib.import_module('.' + _home[name], __name__), name)
    globals()[name] = value
    return value


def __dir__(): return sorted({*globals(), *__all__})
