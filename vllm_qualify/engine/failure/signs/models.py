"""Signs of models that are not there, not whole, or do not fit, and of a hub that does not give them."""

from vllm_qualify.engine.failure.signs.sign import NEXT_LINES, line_up_to, make_sign

# Words of huggingface_hub, its storage, transformers and vLLM.
_REPOSITORY = r"https?://[^/\s]+/(?:api/models/)?(?P<repo>[^/\s]+/[^/\s'.]+(?:\.[^/\s'.]+)*)"
_NO_CONNECTION = r"(?:ConnectError|ConnectTimeout|ReadTimeout|ConnectionError): "

SIGNS = [
    make_sign(
        "broken-installation",
        r"Invalid type of HuggingFace processor",
        "this vLLM was not made for the installed transformers: another class reads the model's pictures",
        "install the transformers that this vLLM was released with, or take a newer vLLM",
    ),
    make_sign("unknown-model", rf"Repository Not Found for url: {_REPOSITORY}", "the hub has no model {repo}, or hides it"),
    make_sign(
        "unknown-model",
        r"(?:Repo id must be in the form '[^']+' or '[^']+'|Invalid repository ID or local directory specified): "
        r"'(?P<repo>[^']+)'",
        "{repo} is neither a folder with a model's configuration nor a repository's name that the hub takes",
        "check the folder's path, as the server sees it, or the repository's name",
    ),
    make_sign(
        "unknown-model",
        r"(?<!\S)(?P<repo>\S+) is not a local folder and is not a valid model identifier",
        "there is no model {repo}: neither a folder nor a repository of the hub",
        needs=(" is not a local folder",),
    ),
    make_sign(
        "unknown-model",
        r"No adapter found for (?P<path>[^\n]{1,300})",
        "there is no adapter at {path}",
        "check the adapter's path, as the server sees it, and how the option names it",
    ),
    make_sign(
        "unknown-revision",
        rf"Revision Not Found for url: {_REPOSITORY}/(?:resolve|revision|tree)/(?P<revision>[^/\s]+)",
        "the model {repo} has no revision {revision}",
    ),
    make_sign(
        "unknown-revision",
        r"(?<!\S)(?P<revision>\S+) is not a valid git identifier",
        "the model has no revision {revision}",
        needs=(" is not a valid git identifier",),
    ),
    make_sign(
        "gated-model",
        rf"{line_up_to('Cannot access gated repo for url ')}{_REPOSITORY}{NEXT_LINES}not in the authorized list",
        "the model {repo} is gated, and the account of this HF_TOKEN is not in its list",
        "ask for access on the repository's page on the hub",
        needs=("not in the authorized list",),
    ),
    make_sign(
        "gated-model",
        rf"Cannot access gated repo for url {_REPOSITORY}",
        "the model {repo} is gated, and no account was named that may read it",
    ),
    make_sign(
        "gated-model",
        r"There was a specific connection error when trying to load (?P<repo>\S+?):?\n"
        r"Client error '(?P<status>40[13] [^'\n]{1,100})'",
        "the hub refuses to give the model {repo} ({status}): it does not exist, or HF_TOKEN may not read it",
        "check the model's name, and that HF_TOKEN is valid and may read it",
    ),
    make_sign(
        "hub-rate-limit",
        rf"429 (?:Client Error: )?Too Many Requests'? for url:? '?{_REPOSITORY}",
        "the hub's rate limit (429) stopped {repo}",
    ),
    make_sign(
        "hub-unreachable",
        rf"Server error '(?P<status>5\d\d [^'\n]{{1,100}})' for url '{_REPOSITORY}",
        "the hub answered {status} for {repo}",
    ),
    make_sign(
        "hub-unreachable",
        rf"{line_up_to(_NO_CONNECTION)}(?P<why>.+)(?:\n(?!.*{_NO_CONNECTION}).*){{0,300}}?"
        r"(?P<telling>We couldn't connect to '(?P<url>[^'\n]+)')",
        "the hub at {url} does not answer: {why}",
        needs=("We couldn't connect to",),
    ),
    make_sign("hub-unreachable", r"We couldn't connect to '(?P<url>[^'\n]+)'", "the hub at {url} does not answer"),
    make_sign(
        "not-in-cache",
        r"LocalEntryNotFoundError: .{0,300}?outgoing traffic has been disabled",
        "the model is not in the hub's cache of this host, and HF_HUB_OFFLINE forbids to download it",
    ),
    make_sign(
        "unsupported-architecture",
        r"Model architectures? \[?'?(?P<name>\w{1,100}+)'?.{0,300}?(?:is|are) not supported",
        "this vLLM version does not support the architecture {name}",
    ),
    make_sign(
        "unsupported-architecture",
        r"^(?:[\w.]{1,100}\.)?\w{1,40}(?:Error|Exception): "
        r"(?P<why>[^\n]{0,100}\b[Aa]rchitecture [^\n]{1,80}not (?:yet )?supported[^\n]{0,100})",
        "this engine does not know the model: {why}",
        needs=("rchitecture ",),
    ),
    make_sign(
        "incomplete-model", r"Cannot find any model weights with [`'](?P<model>[^`'\n]{1,300})", "{model} holds no weights"
    ),
    make_sign(
        "incomplete-model",
        r"StrictDataclass\w{0,40}Error: (?P<why>[^\n]{1,200})",
        "the model's configuration has a value that this engine's transformers does not take: {why}",
        "mend the field of the model's config.json, or take a vLLM version whose transformers takes it",
    ),
    make_sign(
        "unsupported-quantization",
        r"^\w{1,40}Error: (?P<what>[^\n]{0,60}\b[Uu]nsupported [^\n]{0,60}\b(?:scheme|quantization|num_bits|bits"
        r"|group.?size)\b[^\n]{0,200}|[^\n]{0,60}\bquantization (?:\w{1,20} )?is not (?:yet )?supported "
        r"(?:on|for|by)\b[^\n]{0,100})",
        "the quantization does not run on this GPU, or this vLLM does not know it: {what}",
        "take another variant of the model, or a vLLM version that knows this quantization",
        needs=("nsupported ", "quantization "),
    ),
    make_sign("incomplete-model", r"SafetensorError: (?P<why>.+)", "a file of weights is broken: {why}"),
    make_sign(
        "incomplete-model",
        r"Unable to load weights from pytorch checkpoint file [^\n]{1,200}|PytorchStreamReader failed [^\n]{1,100}"
        r"|UnpicklingError: (?:invalid load key, '[v<]'|Weights only load failed)",
        "a file of weights is broken, or is no file of weights: {whole}",
        "bring the file anew; one of Git LFS that begins with 'version https://git-lfs' is only a pointer",
    ),
    make_sign(
        "incomplete-model",
        r"^\w{1,40}: (?P<why>[^\n]{0,200}(?:Error no file named|No tokenizer file found in directory"
        r"|is not the path to a directory containing)[^\n]{1,200})",
        "the model's folder lacks a file: {why}",
        needs=("Error no file named", "No tokenizer file", "is not the path"),
    ),
    make_sign(
        "unsupported-architecture",
        r"Cannot find model module\. '(?P<name>\w{1,100})'|Unknown gguf model_type: (?P<type>[^\n]{1,100})",
        "this vLLM version does not know the model: {whole}",
    ),
    make_sign(
        "gated-model",
        r"Cannot access content at: (?P<url>\S{1,300})"
        r"|(?P<status>40[13]) Client Error: [^\n]{1,60} for url: (?P<other>\S{1,300})",
        "the hub refuses to give what is asked for: {whole}",
        "check that HF_TOKEN is valid, and that its account may read the repository",
        needs=("Cannot access content at", "Client Error: "),
    ),
    make_sign(
        "unsupported-architecture",
        r"The checkpoint you are trying to load has model type `(?P<type>[^`\n]{1,100})` but Transformers does not recognize",
        "the engine's transformers does not know the model type {type}",
        "take a vLLM version whose transformers knows the model",
    ),
    make_sign(
        "unsupported-architecture",
        r"(?P<name>\w{1,100}) has no vLLM implementation and the Transformers implementation is not compatible",
        "this vLLM version has no implementation of {name}, and that of transformers does not fit",
        needs=(" has no vLLM implementation",),
    ),
    make_sign(
        "unsupported-architecture",
        r"Tokenizer class (?P<name>\w{1,100}) does not exist or is not currently imported",
        "the engine's transformers does not know the tokenizer {name}",
        "take a vLLM version whose transformers knows the tokenizer, or mend tokenizer_config.json",
    ),
    # tokenizers reads its own file with a later version's words in it.
    make_sign(
        "unsupported-architecture",
        r"data did not match any variant of untagged enum (?P<what>\w{1,60})",
        "the engine's tokenizers does not know what the model's tokenizer.json holds ({what})",
        "take a vLLM version whose tokenizers is newer, or a tokenizer.json that this one reads",
    ),
    make_sign(
        "unsupported-architecture",
        r"It looks like the config file at '(?P<file>[^'\n]{1,300}\.gguf)' is not a valid JSON file",
        "the model is a GGUF file, {file}, which this vLLM does not read without a plugin",
        "name the model's repository with safetensors, or take an engine environment or an image that has vLLM's GGUF plugin",
    ),
    make_sign(
        "incomplete-model",
        r"It looks like the config file at '(?P<file>[^'\n]{1,300})' is not a valid JSON file",
        "the model's configuration is no JSON: {file}",
    ),
    make_sign(
        "incomplete-model",
        r"Unrecognized model in (?P<model>\S{1,300})\. Should have a `model_type` key",
        "the configuration of {model} names no model type that transformers knows",
        "complete config.json, or take a vLLM version whose transformers knows the model",
    ),
    make_sign(
        "incomplete-model",
        r"(?P<model>\S{1,300}) does not appear to have (?:a file named (?P<file>\S{1,200})|files? )",
        "the model {model} lacks a file: {whole}",
        needs=(" does not appear to have ",),
    ),
    make_sign("incomplete-model", r"Entry Not Found for url: (?P<url>\S{1,300}?)\.?$", "the hub has no such file: {url}"),
    make_sign(
        "incomplete-model",
        r"Couldn't instantiate the backend tokenizer|Can't load (?:the )?(?:tokenizer|image processor"
        r"|feature extractor) for '[^'\n]{1,200}'",
        "the model lacks what its tokenizer or processor is loaded from: {whole}",
    ),
    make_sign(
        "weights-do-not-fit",
        r"Following weights were not initialized from checkpoint: (?P<names>[^\n]{1,300})",
        "the checkpoint lacks weights that the model has: {names}",
        "complete the checkpoint, or take a vLLM version that knows this one",
    ),
    make_sign(
        "weights-do-not-fit",
        r"There is no module or parameter named '?(?P<name>[^'\n]{1,300}?)'? in (?P<model>\S{1,200})",
        "the checkpoint has a weight that the model {model} does not have: {name}",
    ),
    make_sign(
        "weights-do-not-fit",
        r"Attempted to load weight \((?P<has>[^)\n]{1,100}\)?)\) into parameter \((?P<wants>[^)\n]{1,100}\)?)\)",
        "a weight's shape is {has}, and the model's parameter has {wants}",
    ),
    make_sign(
        "weights-do-not-fit", r"size mismatch for (?P<name>\S{1,200}): ", "the shape of the weight {name} is not the model's"
    ),
    make_sign(
        "weights-do-not-fit",
        r"^KeyError: '(?P<name>(?:\w{1,100}\.){1,20}\w{0,60}(?:weight|bias|scale|zero_point|qzeros)\w{0,30}"
        r"|(?:\w{1,100}\.){0,10}(?:layers|blocks|h)\.\d{1,4}\.[\w.]{1,200})'",
        "the checkpoint has a weight that this vLLM's model does not have: {name}",
    ),
    make_sign(
        "weights-do-not-fit",
        r"^(?:AssertionError(?::[^\n]{0,300})?$|RuntimeError: The (?:expanded )?size of (?:the )?tensor[^\n]{0,300})",
        "the shape of a weight is not that of the model's parameter: {whole}",
        through=", in (?:load_weights|\\w{0,40}weight_loader\\w{0,40})$",
    ),
    make_sign(
        "incomplete-model",
        r"^(?:json\.decoder\.)?JSONDecodeError: (?P<why>[^\n]{1,200})",
        "a JSON file of the model is broken: {why}",
        through=r"/(?:transformers|transformers_utils|tokenizers|huggingface_hub)/",
    ),
    make_sign(
        "incomplete-model",
        r"^ +Value error, (?P<why>(?:Expecting value|Expecting property name|Extra data"
        r"|Unterminated string)[^\n]{0,30}: line \d+ column \d+)",
        "a JSON file of the model is empty or broken: {why}",
    ),
    make_sign(
        "hub-unreachable",
        r"(?P<why>CAS service error[^\n]{0,200}|ReqwestMiddleware Error[^\n]{0,200}|hf_xet\S{0,60}: [^\n]{0,200})",
        "the hub's storage (xet) did not answer: {why}",
        "check the network and the proxy, and try again; HF_HUB_DISABLE_XET=1 takes the older way",
    ),
    make_sign(
        "hub-unreachable",
        r"Consistency check failed: file should be of size (?P<whole_size>\d+) but has size (?P<size>\d+)",
        "a file came from the hub with {size} bytes of {whole_size}",
    ),
    make_sign(
        "hub-unreachable",
        r"An error happened while trying to locate the files? on the Hub and we cannot find the (?:requested|appropriate)",
        "the hub does not answer, and the model is not in this host's cache",
    ),
    make_sign(
        "not-in-cache",
        r"OfflineModeIsEnabled: [^\n]{1,200}|Cannot find an appropriate cached snapshot folder",
        "the model is not in the hub's cache of this host, and HF_HUB_OFFLINE forbids to download it",
    ),
]
