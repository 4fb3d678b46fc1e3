"""What a vLLM that finds this package in its environment does with it: it learns one connector's name."""

CONNECTOR = "SpeculatorsHiddenStatesConnector"
MODULE = "speculators.extract.vllm_connector"


def register() -> None:
    """Make `kv_connector="SpeculatorsHiddenStatesConnector"` known to vLLM; safe to call more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.logger import init_logger

    try:
        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)
    except ValueError:
        # vLLM may load its plugins again in one process, and refuses a name that it has.
        init_logger(__name__).debug("%s is registered already", CONNECTOR)
