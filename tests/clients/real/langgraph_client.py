"""LangGraph's agent over ChatOpenAI: tools over two turns of a thread, streamed; an answer by a schema."""

from __future__ import annotations

from check import ANSWER, CITY, QUESTION, QUILL, SCRIPTED, STORY, check, get_weather
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import MemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode, tools_condition


def model(url: str) -> ChatOpenAI:
    return ChatOpenAI(model="quill", base_url=url + "/v1", api_key="none", max_tokens=400)


def agent() -> CompiledStateGraph:
    """A graph of a model and its tools, with a memory of each thread."""
    tools = [tool(get_weather)]
    llm = model(SCRIPTED).bind_tools(tools)
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [llm.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    return graph.compile(checkpointer=MemorySaver())


@check("two turns with a tool")
def _() -> None:
    graph, thread = agent(), {"configurable": {"thread_id": "1"}}
    for turn in (1, 2):
        state = graph.invoke({"messages": [("user", QUESTION)]}, thread)
        assert state["messages"][-1].content == ANSWER, state
        assert len(state["messages"]) == 4 * turn, state


@check("a turn with a tool, streamed")
def _() -> None:
    thread = {"configurable": {"thread_id": "2"}}
    parts = list(agent().stream({"messages": [("user", QUESTION)]}, thread, stream_mode="messages"))
    texts = [part.content for part, where in parts if where["langgraph_node"] == "model"]
    assert "".join(texts).endswith(ANSWER), texts
    assert len([text for text in texts if text]) > 1, texts


@check("an answer by a schema")
def _() -> None:
    schema = {"title": "City", "description": "A city.", **CITY}
    answer = model(QUILL).with_structured_output(schema, method="json_schema").invoke(STORY[0]["content"])
    assert answer["city"] in ("Bern", "Zürich"), answer
