"""Signs of an exception by its class and by the kind of its words, where its words are nobody's that we know."""

from vllm_qualify.engine.failure.signs.sign import make_sign

_EXCEPTION = r"^(?:[\w.]{1,100}\.)?\w{1,40}(?:Error|Exception): "
_CHECK = r"^(?:[\w.]{1,100}\.)?(?:Value|Assertion|NotImplemented|Runtime|Type)Error: "
# Words of those who check what one part of the code hands to another.
_OF_TENSORS = (
    r"(?![^\n]{0,300}(?:\bdim\d?\b|\.(?:size|shape|dtype|dim)\b|->"
    r"|(?i:\btensors?\b(?! parallel)|\bshapes?\b|\bstrides?\b|same dtype|dimension)))"
)
# Names of options, as the command line, the environment, Python or JSON has them.
_OPTION = (
    r"--[a-z]|\bVLLM_[A-Z]|\b[a-z]{2,20}(?:_[a-z0-9]{1,20}){1,6}\b|\b[tpdec]p_size\b|[Mm]ax model len|tensor parallel"
    r"|pipeline|\bYAML\b|[Cc]onfig file"
)
_FAILS = r"fail(?:ed|s)? to|unable to|could not|couldn't|cannot|can't"

# Before the signs of the engine's own code: what is asserted of options is no fault of the code.
FIRST_SIGNS = [
    make_sign(
        "refused-configuration",
        rf"^AssertionError: {_OF_TENSORS}(?![^\n]{{0,300}}(?:capability|[Ss][Mm][ _]?\d|Hopper|Blackwell|Ampere|gfx\d"
        rf"|backend|[Dd]evices?\b|[Gg][Pp][Uu]|[Nn]odes?\b"
        rf"|kernel))(?P<why>(?:(?=[^\n]{{0,400}}(?:{_OPTION}|[Pp]arallel|[Cc]onnector|[Ll]ora|LoRA|[Ss]peculative|draft))"
        r"(?i:[^\n]{0,300}(?:\brequires?\b|\bmust (?:be|divide|have)\b|cannot be|\bonly supports?\b|incompatible|not compatible"
        r"|\bplease\b|should be (?:set|enabled|disabled)|\bset VLLM_))|[^\n]{0,300}(?:must (?:evenly )?divide|\bSet VLLM_))"
        r"[^\n]{0,200})",
        "the engine refuses the configuration: {why}",
        needs=("AssertionError: ",),
    )
]

GENERAL_SIGNS = [
    make_sign(
        "refused-configuration",
        rf"{_EXCEPTION}(?P<why>[^\n]{{0,300}}(?:\b(?:supports|supported) only\b|\bonly "
        r"(?:(?:supported|supports?|available|valid|allowed|compatible|works?)\b|[^\n]{1,150}\b(?:is"
        r"|are) (?:\w{1,20} )?supported\b))"
        r"[^\n]{0,200})",
        "the engine refuses the configuration: {why}",
        needs=("only ", " only"),
    ),
    make_sign(
        "hub-unreachable",
        rf"{_EXCEPTION}(?P<why>(?i:[^\n]{{0,100}}(?:error downloading|(?:{_FAILS}) download)\b)[^\n]{{0,200}})",
        "a file that a start needs could not be fetched: {why}",
        needs=("ownload",),
    ),
    make_sign(
        "weights-do-not-fit",
        rf"{_EXCEPTION}(?P<why>(?i:[^\n]{{0,100}}(?:{_FAILS}) (?:map|match|find|convert|dequantize|shard|split|copy"
        rf"|assign|load)\b"
        r"[^\n]{0,60}\b(?:weights?|parameters?|tensors?|state.?dict|checkpoints?)\b[^\n]{0,100}))",
        "the checkpoint's weights are not those of the engine's model: {why}",
    ),
    make_sign(
        "incomplete-model",
        rf"{_EXCEPTION}(?P<why>(?i:Can't load (?:the )?[\w ]{{1,30}} (?:for|of) '|Converting from \w{{1,40}} failed"
        rf"|[^\n]{{0,60}}(?:{_FAILS})"
        r" (?:load|read|parse|find|instantiate|convert|create)\b[^\n]{0,60}\b(?:tokenizers?|processor|vocab\w{0,10}|merges"
        r"|config\.json|params\.json|chat template))[^\n]{0,200})",
        "a file of the model is missing, or not one that this engine reads: {why}",
    ),
    make_sign(
        "refused-configuration",
        r"^\w{1,40}(?:Error|Exception): (?P<why>[^\n]{0,100}Loading lora \S{1,300} failed[^\n]{0,200})",
        "the adapter cannot be loaded: {why}",
        "check the adapter's path, as the server sees it, or take another adapter",
        needs=("Loading lora ",),
    ),
    make_sign(
        "refused-configuration",
        r"^\w{1,40}Error: (?P<why>[^\n]{0,60}\bprompt\b[^\n]{0,60} is longer than the maximum model length[^\n]{0,200})",
        "the inputs that a start makes up do not fit max-model-len: {why}",
        "raise max-model-len, or lower what a prompt may hold (limit-mm-per-prompt)",
        needs=(" is longer than the maximum model length",),
    ),
    # A start tries the model with made inputs.
    make_sign(
        "engine-bug",
        rf"{_EXCEPTION}(?P<why>[^\n]{{0,100}}(?:multimodal tokens|token count between|prompt updates|placeholder tokens)"
        r"[^\n]{0,200})",
        "the engine and the model's processor do not agree on the inputs that a start makes up: {why}",
        needs=("multimodal tokens", "token count between", "prompt updates", "placeholder tokens"),
    ),
    make_sign(
        "incomplete-model",
        r"No such file or directory: '(?P<file>[^'\n]{0,200}(?:transformers_modules"
        r"|/models--[^'\n]{1,200})/[^'\n]{1,200}\.py)'",
        "a file of the model's own code is not there: {file}",
        needs=(".py'",),
    ),
    make_sign(
        "invalid-value",
        r"^(?:yaml\.\w{1,20}\.)(?P<why>(?:Scanner|Parser|Composer|Constructor)Error: [^\n]{1,200})",
        "a YAML file that the server is given is broken: {why}",
        "mend the YAML file that --config names",
    ),
]

# These count only where nothing else in the log tells why the server ended.
LAST_SIGNS = [
    make_sign(
        "unsupported-architecture",
        rf"{_CHECK}(?P<why>(?i:[^\n]{{0,150}}\b(?:model.type|architecture|model class)\b[^\n]{{0,80}}\b(?:not|un)[ -]?"
        r"(?:recogni[sz]ed|known|registered|implemented))[^\n]{0,150})",
        "this engine does not know the model: {why}",
    ),
    make_sign(
        "refused-configuration",
        rf"{_CHECK}(?P<why>(?i:[^\n]{{0,200}}(?:does not|doesn't|do not) (?:match|fit)\b[^\n]{{0,150}}\b(?:arguments?"
        rf"|options?|flags?)\b)"
        r"[^\n]{0,100})",
        "the engine refuses the configuration: {why}",
    ),
    make_sign(
        "weights-do-not-fit",
        rf"{_CHECK}(?P<why>(?i:[^\n]{{0,150}}\b(?:checkpoints?|safetensors|state.?dict|loaded weights?"
        rf"|weight_scale\w{{0,10}})\b)"
        r"[^\n]{0,150})",
        "the checkpoint's weights are not those of the engine's model: {why}",
    ),
    make_sign(
        "incomplete-model",
        rf"{_CHECK}(?P<why>(?i:[^\n]{{0,150}}\b(?:config\.json|tokenizer|processor|chat template|hf_config"
        rf"|model config\w{{0,10}})\b)"
        r"[^\n]{0,150})",
        "the model's configuration, tokenizer or processor is not one that this engine takes: {why}",
    ),
    make_sign(
        "refused-configuration",
        rf"{_CHECK}{_OF_TENSORS}(?P<why>(?=[^\n]{{0,400}}(?:{_OPTION}))(?i:[^\n]{{0,300}}(?:cannot be|can't be"
        r"|must (?:be|have|match|not|contain)|should (?:be|have|not|provide|use|set|match)|\binstead of\b|(?:does not"
        r"|doesn't) (?:match|fit|equal)|is (?:larger|greater|smaller|less|too)"
        r"|exceeds?\b|requires?\b"
        r"|needs?\b|please\b|\bset VLLM_|not allowed|invalid|conflict|(?:un)?expected|unknown|at (?:least|most)\b"
        r"|without|disable"
        r"|enable)|[^\n]{0,300}\bSet [A-Z_]{4,60}=)[^\n]{0,200})",
        "the engine refuses the configuration: {why}",
    ),
    make_sign(
        "refused-configuration",
        rf"^(?:Assertion|Value|NotImplemented)Error: {_OF_TENSORS}(?P<why>(?i:[^\n]{{0,300}}(?:\brequires?\b|\bis required\b"
        r"|\bsupport(?:s|ed)?\b|incompatible|cannot be used|must (?:evenly )?divide|must be (?:greater|less|larger"
        r"|smaller|at least|at most"
        r"|enabled|disabled)"
        r"|\bconsider\b|\bplease (?:set|use|specify|increase|decrease|reduce|enable|disable)\b))[^\n]{0,200})",
        "the engine refuses the configuration: {why}",
    ),
    make_sign(
        "engine-bug",
        r"^(?P<what>AssertionError(?:: [^\n]{1,300})?$"
        r"|(?:IndexError|StopIteration|AttributeError|TypeError)(?:: [^\n]{1,300})?$|NotImplementedError$"
        # Upper case is the environment's, which the engine does not ask for.
        r"|KeyError: (?!['\"][A-Z][A-Z0-9_]{2,60}['\"]$)[^\n]{1,300}"
        r"|RuntimeError: (?i:[^\n]{0,200}(?:\btensors?\b|\bshapes?\b|\bdtypes?\b|\bbroadcast|size mismatch"
        r"|mat1 and mat2|sizes? of"
        r"|\bstrides?\b|failed to apply|\binvalid for input of size|\bdim(?:ension)?s?\d?\b|scalar type"
        r"|expected [^\n]{1,60} but (?:found|got)\b))[^\n]{0,200}"
        r"|ValueError: (?i:[^\n]{0,200}(?:values to unpack|is not in list|zero-size array"
        r"|could not be broadcast))[^\n]{0,200})",
        "the engine's own code failed: {what}",
    ),
]
