// The one translation unit of a library. Torch's headers take most of the time of a build, so they are read once.
#include "exit.cpp"
#include "head.cpp"
#include "layers.cpp"
#include "linear.cpp"
#include "t5_layers.cpp"
