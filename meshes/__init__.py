from neoproto.packages import missing_from

__getattr__ = missing_from(__name__)
