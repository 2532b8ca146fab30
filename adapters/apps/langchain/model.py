"""A LangChain chat model that calls fakevllm's proxy. The environment variables OPENAI_BASE_URL and
OPENAI_API_KEY set the proxy's URL and key."""

from langchain_openai import ChatOpenAI

model = ChatOpenAI(model="app-model")
