"""The engine around the core: process, client, frontend, supervisor, offline `LLM`.

core, inbox        the one loop, and the messages it takes
build              EngineConfig -> EngineCore: where an executor is chosen
client             EngineClient: send, receive; in this process
process, child     the same over a process boundary (ZeroMQ, msgspec)
supervisor         restarts a dead engine and re-admits what was in flight
output             token events -> text, stop strings
prepare            prompt + SamplingParams -> Request
frontend, stream   asyncio
llm                the offline API
"""
