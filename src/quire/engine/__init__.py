"""The engine around the core.

core               the messages to an engine, and the one loop
build              EngineConfig -> EngineCore: where an executor is chosen
calls              what the loop answers beside requests, loaded with the first call
client, in_process EngineClient: send, receive; and the client of an engine in this process
spawn, child       the engine process
process            its client (ZeroMQ, msgspec)
supervisor         restarts a dead engine and admits its requests again
assemble           EngineArgs -> configuration, tokenizer, chat template
helper, helper_pool    grammars (grammar_checker) and unknown templates, in processes with limits
prompts            text, messages -> token ids; with SamplingParams -> Request
output, stream     token events -> text, stop strings; the streams of requests
frontend           asyncio
llm, results       the offline API
"""
