from .batch import DataProtoItem as DataProtoItem
from .dispatch import RankSplit as RankSplit
from .dispatch import collect as collect
from .dispatch import split_for_ranks as split_for_ranks
from .proto import DataProto as DataProto
from .proto import pad_dataproto_to_divisor as pad_dataproto_to_divisor
from .proto import unpad_dataproto as unpad_dataproto
