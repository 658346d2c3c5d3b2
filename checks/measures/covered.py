"""Files that a test file of another name covers, by their place in the work tree.

A file of `specrouter/http` is covered where its endpoint is, and the parts of a benchmark with the
benchmark. What is not here and has no `test_NAME.py` at its place lacks a test of its own.
"""

from collections.abc import Mapping

_BY_TEST: Mapping[str, Mapping[str, str]] = {
    "specrouter/bench": {
        "agent_workload": "test_trajectories",
        "bare_forward": "test_contenders",
        "conditions": "test_report",
        "lineup": "test_contenders",
        "load_bench": "test_load",
        "load_figures": "test_load",
        "load_options": "test_load",
        "load_plot": "test_load",
        "load_points": "test_load",
        "load_prompts": "test_prompts",
        "load_report": "test_load",
        "load_services": "test_load",
        "options": "test_chains",
        "output_file": "test_chains",
        "peer": "test_contenders",
        "plot": "test_report",
        "reference": "test_contenders",
        "sample": "test_rounds",
        "session": "test_chains",
    },
    "specrouter/cli": {
        "bench": "../bench/test_chains",
        "bench_chains": "../bench/test_chains",
        "bench_load": "../bench/test_load",
        "bench_turns": "../bench/test_turns",
        "check_report": "test_check",
        "export_gguf": "../../modelpool/export/test_gguf_file",
        "generate": "test_cli",
        "generate_text": "test_cli",
        "main": "test_cli",
        "serve": "../http/test_serve",
    },
    "specrouter/cluster": {
        "forwarder": "test_router",
        "dispatcher": "test_router",
        "fleet": "test_router",
        "job": "test_router",
        "link": "test_router",
        "local": "test_router",
        "replica_metrics": "test_router",
    },
    "specrouter/config": {
        "engine": "../engine/test_prefix_cache",
        "router": "test_config",
        "server": "test_config",
    },
    "specrouter/engine": {
        "prefix_log": "test_prefix_cache",
        "request_args": "test_input_validation",
        "request_meter": "../http/test_prometheus",
        "serving": "../http/test_router_pages",
    },
    "specrouter/execution": {
        "cached_prefixes": "../engine/test_prefix_cache",
        "group_draft": "test_chain_drafter",
        "runtime": "test_executor",
    },
    "specrouter/http": {
        "answer_schemas": "test_openapi",
        "app": "test_guards",
        "chat_answer": "test_tool_calls",
        "chat_template": "test_chat",
        "completion_answer": "test_completions",
        "conversation_fields": "test_chat",
        "error_answer": "test_any_input",
        "errors": "test_any_input",
        "keys": "test_guards",
        "metrics_page": "test_prometheus",
        "models": "test_openapi",
        "openai_answer": "test_completions",
        "openai_fields": "test_any_input",
        "prometheus_models": "test_prometheus",
        "prometheus_vllm": "test_prometheus",
        "request_fields": "test_generate",
        "service": "test_generate",
        "streams": "test_completions",
        "structure_fields": "test_generate",
    },
    "specrouter/profile": {
        "cycle_times": "test_prediction",
        "evidence": "test_outcomes",
        "snapshot": "test_profiler",
    },
    "specrouter/request": {
        "grammar": "test_structure",
        "handle": "test_running",
        "output": "test_running",
        "spec": "test_running",
    },
    "specrouter": {"cycle": "slo/test_tree_selection"},
    "specrouter/routing": {
        "cycle_routes": "test_planner",
        "decision_record": "test_planner",
        "route": "test_planner",
    },
    "specrouter/slo": {"policies": "../../research/sim/test_named_policies"},
    "specrouter/slo/serve": {"program": "test_pacing"},
    "processors": {
        "beam": "test_draft",
        "beam_slots": "test_draft",
        "drafted_paths": "test_verify",
        "grammar_masks": "test_grammar",
        "row_noise": "test_noise",
        "sampling_row": "test_sampler",
        "shared_noise": "test_draft",
        "verify_result": "test_verify",
    },
    "statemgr": {
        "arena": "test_prefix_sharing",
        "kv_placement": "test_prefix_sharing",
        "prefix_cache": "test_prefix_sharing",
        "row_groups": "test_masks",
        "row_layout": "test_prefix_sharing",
    },
    "modelpool": {
        "config_faults": "test_config",
        "loaded_models": "test_pool",
        "member": "test_pool",
        "placed_members": "test_pool",
        "probe": "test_packed_model",
    },
    "modelpool/export": {"llama_tensors": "test_gguf_file"},
    "modelpool/inflate": {"llama_sizes": "test_inflate", "tensors": "test_inflate"},
    "modelpool/checkpoint": {"architecture": "../test_architectures"},
    "modelpool/fast": {
        "layer_kernels": "test_cuda_forward",
        "layer_reference": "test_cuda_forward",
        "lean_linear": "test_lean_forward",
        "llama_shape": "test_lean_forward",
    },
}
COVERED: Mapping[str, str] = {
    f"{folder}/{name}.py": f"{folder}/{test}.py"
    for folder, tests in _BY_TEST.items()
    for name, test in tests.items()
}
