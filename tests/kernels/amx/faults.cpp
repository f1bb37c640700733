// Uses tiles in the wrong way that its argument names; without one, in the right way. See test_emulated_tiles.py.
#include <string>

#include "cpu/amx.h"

using namespace quire::cpu::QUIRE_ISA;

int main(int, char** arguments) {
  const std::string fault = arguments[1];
  alignas(64) char memory[kTileRows * kTileBytes] = {};
  {
    Tiles tiles;
    TileShapes shapes;
    shapes.set(0, 16, 64), shapes.set(1, 16, 32), shapes.set(2, 8, 64), shapes.set(3, 16, 64), shapes.set(4, 5, 64);
    if (fault == "large") shapes.set(5, 17, 64);
    if (fault == "empty") shapes.set(5, 16, 0);
    if (fault == "ninth") shapes.set(8, 16, 64);
    if (fault == "unset") tile_zero<0>();
    tiles.shape(shapes);
    if (fault == "shapeless") tile_load<7>(memory, 64);
    if (fault == "rows") tile_dot_ss8<4, 1, 2>();
    if (fault == "columns") tile_dot_su8<1, 3, 0>();
    if (fault == "k") tile_dot_bf16<0, 3, 2>();
    tile_load<1>(memory, 64);
    tile_dot_ss8<0, 1, 2>();
    tile_store<0>(memory, 64);
  }
  if (fault == "released") tile_store<0>(memory, 64);
}
