// The one translation unit of a library. Torch's headers take most of the time of a build, so they are read once.
#include "head.cpp"
#include "linear.cpp"
#if __has_include("layers.cpp")
#include "layers.cpp"
#endif
