"""LangChain before fakevllm: OPENAI_BASE_URL and OPENAI_API_KEY are read from the environment."""

from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="app-model")
