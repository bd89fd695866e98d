"""Who builds what. The composition root has these parts, the outermost first:

`serve_models.load_models`     several models: one step loop, one store, one budget of memory
`serve.load_serving`           one model for APIs and the library: engine thread, prompts, agents
`bootstrap.build_engine`       an engine: model, pool, store, scheduler; `rebuild_app` replaces it
`process_stores.open_store`    the tiers of blocks; beside it the stores of turns and responses
`memory_shares.guarded_loop`   the step loop with its memory guard; each part's share of memory
`framework.mlx_provider`       the loader of models; the device and BLAS
`named_models`, `plugins`      models by name; parts of the fleet and of the server, if installed
"""
