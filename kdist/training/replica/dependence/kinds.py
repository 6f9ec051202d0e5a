"""Kinds of TensorFlow's operations, by what they do with the rows of a batch."""

LINEAR = {"Abs", "Cast", "CheckNumerics", "EnsureShape", "Identity", "IdentityN", "Neg", "Relu"}
LINEAR |= {"PreventGradient", "Snapshot", "Squeeze", "StopGradient"}
SUMS = {"Add", "AddN", "AddV2", "Maximum", "Minimum", "Sub"}
QUOTIENTS = {"Div", "DivNoNan", "RealDiv", "Xdivy"}
POWERS = {"Square": 2.0, "Sqrt": 0.5, "Rsqrt": -0.5, "Reciprocal": -1.0, "Inv": -1.0}
POWERS |= {"Sign": 0.0}
REDUCTIONS = {"All", "Any", "EuclideanNorm", "L2Loss", "Max", "Mean", "Min", "Prod", "Sum"}
CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
# Operations whose result has a shape that depends on values.
UNIQUE = {"Unique", "UniqueV2", "UniqueWithCounts", "UniqueWithCountsV2"}
SIZED_BY_VALUES = {"RaggedTensorToTensor", "Where", *UNIQUE}
# Operations that turn values of sparse or ragged rows into rows, and which input has their number.
SHAPES_OF_PARTS = {"RaggedTensorToTensor": 0, "SparseReduceMax": 2, "SparseReduceSum": 2}
SHAPES_OF_PARTS |= {"SparseTensorDenseMatMul": 2, "SparseToDense": 1}
# Operations whose rows depend on their positions, or on which other rows there are.
BY_POSITION = {"DynamicPartition", "DynamicStitch", "GatherNd", "ListDiff", "Range", "ScatterNd"}
SEGMENTS = {"UnsortedSegmentMax", "UnsortedSegmentMin", "UnsortedSegmentSum"}
TENSOR_SCATTERS = {f"TensorScatter{name}" for name in ("Add", "Max", "Min", "Sub", "Update")}
BY_POSITION |= {"ParallelDynamicStitch", *TENSOR_SCATTERS, *SEGMENTS, *SIZED_BY_VALUES}
# Those that return the parts of a sparse tensor.
BY_POSITION |= {f"{kind}CountSparseOutput" for kind in ("Dense", "Ragged", "Sparse")}
BY_POSITION |= {"StringSplit", "StringSplitV2"}
BRANCHES = {"Case", "If", "StatelessCase", "StatelessIf"}
# Operations that combine rows which have the same number, and follow each other.
OF_SORTED_SEGMENTS = {f"Segment{name}" for name in ("Max", "Mean", "Min", "Prod", "Sum")}
OF_SORTED_SEGMENTS |= {f"{name}V2" for name in ("SegmentMax", "SegmentMin", "SegmentProd")}
OF_SORTED_SEGMENTS |= {"SegmentSumV2", "SparseSegmentMean", "SparseSegmentSum"}
# Operations that commute with a sum over replicas, if their other inputs are not gradients.
LINEAR_IN_GRADIENTS = {"BroadcastTo", "ConcatV2", "ExpandDims", "GatherV2", "Mean", "Pack"}
LINEAR_IN_GRADIENTS |= {"Reshape", "Split", "SplitV", "StridedSlice", "Sum", "Tile", "Transpose"}
LINEAR_IN_GRADIENTS |= {"UnsortedSegmentSum"}  # slices as a tensor
LINEAR_IN_GRADIENTS |= {"Add", "AddN", "AddV2", "Sub", "Unpack", *LINEAR} - {"Abs", "Relu"}
ELEMENTWISE = {"Mul", "SquaredDifference", *QUOTIENTS, *SUMS} - {"AddN"}
# Operations whose result is computed from the values of all operands, and not from shapes or axes.
ARITHMETIC = {"FloorDiv", "Mod", "FloorMod", "Pow", "AddN", *ELEMENTWISE, *LINEAR, *POWERS}
COMPARISONS = {"Equal", "Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr"}
COMPARISONS |= {"NotEqual", "Pow", "SelectV2"}
CUMULATIVE = {"Cumprod", "Cumsum", "CumulativeLogsumexp"}
BILINEAR = {"BatchMatMulV2", "Einsum", "MatMul", "Mul"}
JOINS = {"AddN", "ConcatV2", "Pack", *BILINEAR, *COMPARISONS, *ELEMENTWISE}
WITH_CONSTANTS_OF_ROWS = {"InTopKV2", "SoftmaxCrossEntropyWithLogits", *JOINS}
WITH_CONSTANTS_OF_ROWS |= {"Select", "SparseSoftmaxCrossEntropyWithLogits", "GatherV2", "Tile"}
WITH_CONSTANTS_OF_ROWS |= {*BRANCHES, *SEGMENTS}
# Operations that lead from a shape to a number of rows.
OF_COUNTS = {"Cast", "Const", "GatherV2", "Identity", "Mul", "Pack", "Prod", "Reshape", "Shape"}
OF_COUNTS |= {"Size", "Squeeze", "StridedSlice"}
# Operations on the last two axes.
OF_MATRICES = {"Cholesky", "LogMatrixDeterminant", "MatrixDeterminant", "MatrixInverse"}
OF_MATRICES |= {"MatrixSolve", "MatrixTriangularSolve", "Qr", "SelfAdjointEigV2", "Svd"}
# Fourier transforms, and the number of their last axes that they combine.
FOURIER = {
    f"{kind}FFT{suffix}": axes
    for kind in ("", "I", "R", "IR")
    for suffix, axes in (("", 1), ("2D", 2), ("3D", 3))
}
# Operations that combine neighbors along all axes but the first one.
OF_NEIGHBORS = {"AvgPool", "AvgPool3D", "Conv2D", "Conv3D", "DepthwiseConv2dNative", "Dilation2D"}
OF_NEIGHBORS |= {"ExtractImagePatches", "LRN", "MaxPool", "MaxPool3D", "MaxPoolV2"}
OF_NEIGHBORS |= {"ResizeBicubic", "ResizeBilinear", "ResizeNearestNeighbor"}
FUSED_BATCH_NORMS = {"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"}
# Operations on the diagonals of matrices, which are positions if rows are along these.
OF_DIAGONALS = {"MatrixBandPart", "MatrixDiag", "MatrixDiagV2", "MatrixDiagV3"}
OF_DIAGONALS |= {"MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3"}
# With the number of rows, these change the positions of rows.
MOVING_POSITIONS = {"FloorDiv", "FloorMod", "Maximum", "Minimum", "Mod", "Sub"}
# Functions of Python and of JAX, of which the graph does not show what they do with rows.
HIDDEN = {"EagerPyFunc", "PyFunc", "PyFuncStateless", "XlaCallModule"}
PADDING = {"MirrorPad", "Pad", "PadV2"}
# Other operations that may leave no axis of rows.
SUMMARIES = {"ArgMax", "ArgMin", "ReduceJoin", "ScatterNd", "StridedSlice", *UNIQUE}
SUMMARIES |= TENSOR_SCATTERS
COUNTING = {"Bincount", "DenseBincount", "HistogramFixedWidth"}
LOOPS = {"StatelessWhile", "While"}
CONTROL_FLOW = {*BRANCHES, *LOOPS}
# Operations that do not compute with their inputs, but choose or collect them.
COLLECTING = {"ConcatV2", "IdentityN", "Pack", "TensorListFromTensor", "TensorListPushBack"}
COLLECTING |= {"TensorListSetItem", *CALLS, *CONTROL_FLOW}
STATEFUL_AND_FIXED = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"}
