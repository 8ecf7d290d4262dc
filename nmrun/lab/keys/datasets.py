"""The keys of data sets: images, texts with labels, and running text whose next token a model learns."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, TypeVar

from nmrun.lab.keys.groups import Group, Named
from nmrun.ranges import (
    FLAG,
    OPTIONAL_TEXT,
    PATH,
    SEED,
    TEXT,
    Check,
    is_path,
    number,
    one_of,
    whole,
)

Keys = TypeVar("Keys", bound=Group)
SCORES = ("accuracy", "f1", "matthews", "pearson", "spearman")
SHARE = number(0, 0.5, open_low=True)
METRIC = Check(
    f"{', '.join(SCORES)} or the dotted path of a function",
    lambda value: value in SCORES or is_path(value),
    options=SCORES,
)
# what a data set has, and a model takes
IMAGES, TEXTS, RUNNING_TEXT = "images", "texts with labels", "running text"
CLASSES = "a folder of images for each class, or train and val with such"


@dataclass(frozen=True)
class Dataset(Named):
    """A data set, with ``data`` in it.

    ``within`` says what is in the folder ``dataset.path``, if there is such a key; ``places`` are
    the keys that name another file or folder. ``builder`` is the dotted path of what builds its
    task.
    """

    data: ClassVar[str] = IMAGES
    within: ClassVar[str] = ""
    places: ClassVar[tuple[str, ...]] = ()
    builder: ClassVar[str] = ""

    def as_kind(self, kind: type[Keys]) -> Keys:
        """The keys of ``kind``, which a data set of the user's own may have as well. Raises
        ConfigError for keys that are not there.
        """
        return self if isinstance(self, kind) else kind.of(self.mapping(), "dataset")


@dataclass(frozen=True)
class OwnDataset(Dataset):
    """A data set of the user's own: ``target`` builds its task and knows its ``options``."""

    target: str
    options: dict[str, Any]

    def values(self) -> dict[str, Any]:
        return dict(self.options)


@dataclass(frozen=True)
class Seeded(Group):
    """How a data set is divided."""

    split_seed: Annotated[
        int,
        SEED,
        "which examples are for training, validation and test; not changed by the run's seed",
    ] = 0


@dataclass(frozen=True)
class Fractions(Group):
    """What is cut from a data set for validation and test."""

    val_fraction: Annotated[
        float, SHARE, "share that is for validation, where that has no file of its own"
    ] = 0.05
    test_fraction: Annotated[
        float, SHARE, "share that is for the test, where that has no file of its own"
    ] = 0.05


@dataclass(frozen=True, kw_only=True)
class OwnFiles(Fractions):
    """Files of the user's own."""

    places: ClassVar[tuple[str, ...]] = ("train", "val", "test")

    train: Annotated[str, PATH, "file to train with, in NMRUN_DATA or else in the current folder"]
    val: Annotated[
        str | None, OPTIONAL_TEXT, "file for validation; null = a part of that for training"
    ] = None
    test: Annotated[
        str | None, OPTIONAL_TEXT, "file for the test; null = a part of that for training"
    ] = None


@dataclass(frozen=True)
class Subset(Seeded):
    """How many images each part has."""

    train_size: Annotated[
        int | None,
        whole(1, optional=True),
        "training images, the same number of every class; null = all that are not for validation",
    ] = None
    val_size: Annotated[
        int | None,
        whole(1, optional=True),
        "images taken from those for training; null = a tenth of each class",
    ] = None
    test_size: Annotated[
        int | None, whole(1, optional=True), "a subset of the test images; null = all"
    ] = None


@dataclass(frozen=True)
class FromDisk(Group):
    """Items that are read from files while the training is at earlier ones."""

    workers: Annotated[
        int | None,
        whole(0, optional=True),
        "processes of each rank that read files; null = one a core, shared by the ranks of a "
        "machine; 0 = none but the training itself",
    ] = None


@dataclass(frozen=True)
class Augmented(Group):
    """How training images are augmented; see ``nmrun.lab.tasks.vision.augmentation.Augment``."""

    flip: Annotated[bool, FLAG, "mirror every second training image left to right"] = True
    randaugment: Annotated[int, whole(0), "operations of RandAugment in a row; 0 = off"] = 0
    randaugment_magnitude: Annotated[int, whole(0, 30), "strength of these operations, 0 to 30"] = 9
    erasing: Annotated[float, number(0, 1), "probability of random erasing"] = 0.0
    mixup: Annotated[float, number(0), "mixup's alpha; 0 = off"] = 0.0
    cutmix: Annotated[
        float, number(0), "cutmix's alpha; 0 = off. With mixup too, each batch has one of them"
    ] = 0.0


@dataclass(frozen=True)
class Digits(Fractions, Seeded, Dataset):
    """scikit-learn's digits: 1,797 real 8x8 grey images of handwritten digits, which need no
    download.
    """

    builder: ClassVar[str] = "nmrun.lab.tasks.vision.images.digits"

    val_fraction: float = 0.15
    test_fraction: float = 0.2


@dataclass(frozen=True)
class Images(Augmented, Subset, Dataset):
    """Images of classes, all of which fit into memory."""

    builder: ClassVar[str] = "nmrun.lab.tasks.vision.images.torchvision_files"

    crop_padding: Annotated[
        int,
        whole(0),
        "black pixels around a training image, from which a random window is cut",
    ] = 0
    resolution: Annotated[
        int | None,
        whole(1, optional=True),
        "pixels of a side: images of another size are scaled and cropped to the middle. null = as "
        "they are; of a folder, the shorter side of the median image up to 64, and 224 for larger "
        "ones",
    ] = None


@dataclass(frozen=True)
class Cifar10(Images):
    """CIFAR-10: 50,000 training and 10,000 test images of 32x32 in 10 classes. They come from
    NMRUN_DATA, as torchvision stores them or as images (cifar10/cifar10-jpeg or
    cifar10-jpeg.tar.xz; JPEG loses a little). torchvision downloads them if neither is there.
    """

    crop_padding: int = 4


@dataclass(frozen=True)
class Cifar100(Images):
    """CIFAR-100: 50,000 training and 10,000 test images of 32x32 in 100 classes; downloaded to
    NMRUN_DATA if it is not there.
    """

    crop_padding: int = 4


@dataclass(frozen=True)
class FashionMNIST(Images):
    """Fashion-MNIST: 60,000 training and 10,000 test grey images of 28x28 in 10 classes; downloaded
    to NMRUN_DATA if it is not there.
    """


@dataclass(frozen=True, kw_only=True)
class ImageFolder(Images):
    """A folder with a folder of images for each class. It may have such folders below train, val
    and test; val and test need not be there.
    """

    within: ClassVar[str] = CLASSES
    builder: ClassVar[str] = "nmrun.lab.tasks.vision.images.image_folder"

    path: Annotated[
        str,
        PATH,
        "the folder or a tar archive of it, in NMRUN_DATA or else in the current folder",
    ]


@dataclass(frozen=True)
class ImageNet(FromDisk, Augmented, Subset, Dataset):
    """ImageNet, or any other large image folder with train and val, read from the disk during
    training.
    """

    within: ClassVar[str] = CLASSES
    builder: ClassVar[str] = "nmrun.lab.tasks.vision.images.imagenet"

    path: Annotated[str, PATH, "the folder, in NMRUN_DATA or else in the current folder"] = (
        "imagenet"
    )
    resolution: Annotated[int, whole(1), "pixels of a side"] = 224
    crop_scale: Annotated[
        float,
        number(0, 1, open_low=True),
        "smallest share of a training image's area that a random crop has",
    ] = 0.08
    val_size: Annotated[
        int | None,
        "images taken from those for training, the same number of every class; null = a tenth"
        " of each class",
    ] = 10_000
    test_size: Annotated[
        int | None, "a subset of the test images, which are those of val; null = all"
    ] = None


MODELS_OWN = "${oc.select:model.pretrained,words}"  # the tokenizer that a model came with
# that of an image network is true or false: what is wrong then is the network, and rules say so
TOKENIZER = Check(
    TEXT.allowed, lambda value: isinstance(value, bool) or TEXT.holds(value), why=TEXT.why
)


@dataclass(frozen=True)
class Encoding(Group):
    """Texts for classification."""

    data: ClassVar[str] = TEXTS

    max_length: Annotated[int, whole(8), "tokens at most; longer texts are cut"] = 128
    tokenizer: Annotated[
        str,
        TOKENIZER,
        "words (hashed), or a Hugging Face tokenizer by name or folder; default: the model's own",
    ] = MODELS_OWN
    vocabulary: Annotated[int, whole(4), "size of the table that words are hashed to"] = 8192


@dataclass(frozen=True)
class GeneratedText(Encoding, Seeded, Dataset):
    """Generated reviews, good or bad, in which "not" turns the next verdict around; not real
    language.
    """

    builder: ClassVar[str] = "nmrun.lab.tasks.text.labelled.generated_text"

    size: Annotated[
        int,
        whole(1),
        "training texts; 500 others are for validation and 500 for the test",
    ] = 4000
    max_length: int = 32
    vocabulary: int = 1024


@dataclass(frozen=True)
class Glue(Encoding, Seeded, Dataset):
    """One of GLUE's tasks, from its TSV files in NMRUN_DATA/glue, or by Hugging Face's datasets if
    that is installed.
    """

    builder: ClassVar[str] = "nmrun.lab.tasks.text.labelled.glue"

    task: Annotated[
        str,
        one_of("cola", "sst2", "mrpc", "qqp", "stsb", "mnli", "qnli", "rte", "wnli"),
        "cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte, wnli",
    ] = "sst2"
    held_out: Annotated[
        float,
        number(0, 0.5),
        "share of the training texts that is for validation, while the development set is the"
        " test. 0 = the development set is for validation, and there is no test",
    ] = 0.05
    limit: Annotated[
        int | None,
        whole(1, optional=True),
        "training texts that are used, the first after shuffling; null = all",
    ] = None


@dataclass(frozen=True, kw_only=True)
class LabelledText(OwnFiles, Encoding, Seeded, Dataset):
    """Texts with labels from files of your own: .csv, .tsv, .json, .jsonl or .parquet (needs
    nmrun[texts]).
    """

    builder: ClassVar[str] = "nmrun.lab.tasks.text.labelled.labelled_text"

    column: Annotated[str, TEXT, "column with the texts"] = "text"
    pair: Annotated[
        str | None, OPTIONAL_TEXT, "column with the second texts of pairs; null = single texts"
    ] = None
    label: Annotated[
        str, TEXT, "column with the labels: classes, or scores where all are fractions"
    ] = "label"
    metric: Annotated[
        str,
        METRIC,
        f"{', '.join(SCORES)}, or the path of a function of labels and predictions, such as "
        "sklearn.metrics.balanced_accuracy_score",
    ] = "accuracy"
    higher_is_better: Annotated[bool, FLAG, "whether higher values of the metric are better"] = True
    val_fraction: float = 0.1
    test_fraction: float = 0.1


@dataclass(frozen=True)
class Context(Group):
    """Running text, and what language models look back on."""

    data: ClassVar[str] = RUNNING_TEXT

    context: Annotated[int, whole(1), "tokens that a prediction can look back on"] = 64


@dataclass(frozen=True)
class Tokenized(Context):
    """A text that is made into tokens."""

    tokenizer: Annotated[
        str,
        TEXT,
        "byte, character, word, or a Hugging Face tokenizer: tokenizer.json, its folder, or a name "
        "such as gpt2",
    ] = "byte"


@dataclass(frozen=True)
class Strided(Group):
    """How a long text is evaluated."""

    stride: Annotated[
        int | None,
        whole(1, optional=True),
        "tokens by which an evaluation's window moves, at most context; null = context, "
        "windows side by side",
    ] = None


@dataclass(frozen=True)
class StdlibText(Strided, Context, Dataset):
    """Source of some modules of Python's standard library as bytes (about 1.1 MB): real program
    text that needs no download.
    """

    builder: ClassVar[str] = "nmrun.lab.tasks.text.files.stdlib"

    sha256: Annotated[str, TEXT, "hash of the text, which differs between versions of Python"] = (
        "${stdlib_sha256:stdlib_text}"
    )


@dataclass(frozen=True)
class StdlibTextAll(StdlibText):
    """All of Python's standard library as bytes, without its tests (about 11 MB): enough for runs of
    ten thousand steps.
    """

    sha256: str = "${stdlib_sha256:stdlib_text_all}"


@dataclass(frozen=True)
class WikiText2(Strided, Tokenized, Dataset):
    """WikiText-2, NMRUN_DATA/wikitext-2/wiki.{train,valid,test}.tokens (or {train,valid,test}.txt)."""

    builder: ClassVar[str] = "nmrun.lab.tasks.text.files.wikitext"

    tokenizer: str = "word"
    context: int = 128


@dataclass(frozen=True)
class WikiText103(WikiText2):
    """WikiText-103, NMRUN_DATA/wikitext-103/wiki.{train,valid,test}.tokens (or
    {train,valid,test}.txt).
    """


@dataclass(frozen=True)
class Shakespeare(Strided, Fractions, Tokenized, Dataset):
    """tiny Shakespeare, NMRUN_DATA/tinyshakespeare/input.txt: 1.1 million characters of plays."""

    builder: ClassVar[str] = "nmrun.lab.tasks.text.files.shakespeare"

    tokenizer: str = "character"


@dataclass(frozen=True, kw_only=True)
class TextFiles(OwnFiles, Strided, Tokenized, Dataset):
    """Any text files."""

    builder: ClassVar[str] = "nmrun.lab.tasks.text.files.text_files"


@dataclass(frozen=True, kw_only=True)
class HubText(Strided, Tokenized, Dataset):
    """Texts that Hugging Face's datasets loads, from its hub or from files (needs nmrun[texts]);
    rows are joined by an empty line, those without a text left out.
    """

    builder: ClassVar[str] = "nmrun.lab.tasks.text.files.hub"

    path: Annotated[
        str,
        TEXT,
        "what load_dataset takes: a name on the hub (Salesforce/wikitext), a folder of files, or "
        "json, csv, parquet, text with dataset.files",
    ]
    subset: Annotated[
        str | None,
        OPTIONAL_TEXT,
        "subset of the data set, such as wikitext-2-raw-v1; null = the only one",
    ] = None
    files: Annotated[
        str | None,
        OPTIONAL_TEXT,
        "files to read, such as en/c4-train.00000-of-01024.json.gz (* stands for anything); "
        "null = all",
    ] = None
    column: Annotated[str, TEXT, "column with the texts"] = "text"
    train: Annotated[
        str, TEXT, "split to train with, as datasets writes it, such as train[:90%]"
    ] = "train"
    val: Annotated[str, TEXT, "split for validation"] = "validation"
    test: Annotated[
        str | None, OPTIONAL_TEXT, "split for the test; null = runs have validation metrics alone"
    ] = "test"
    context: int = 1024


@dataclass(frozen=True, kw_only=True)
class TokenBin(Strided, Context, Dataset):
    """Token files in nanoGPT's layout, memory-mapped: train.bin, val.bin and perhaps test.bin, of
    16-bit numbers.
    """

    places: ClassVar[tuple[str, ...]] = ("folder",)
    builder: ClassVar[str] = "nmrun.lab.tasks.text.files.token_bin"

    folder: Annotated[
        str,
        PATH,
        "folder with the files, in NMRUN_DATA or else in the current folder; without test.bin, "
        "runs have validation metrics alone",
    ]
    vocabulary: Annotated[
        int,
        whole(4),
        "number of tokens; a multiple of 64, such as 50304, is faster on a GPU",
    ] = 50257
    context: int = 1024
