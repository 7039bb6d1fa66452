# Finds LibTorch and defines maniple_train, the only library that may see it.
#
# Debian 12 ships LibTorch 1.13 (libtorch-dev); any LibTorch up to today's 2.x will do: -DCMAKE_PREFIX_PATH=/path/to/libtorch.
# Sets MANIPLE_HAVE_TORCH. Without LibTorch everything else is built, and the configuration says what is left out.
set(MANIPLE_HAVE_TORCH OFF)
if(NOT MANIPLE_TRAIN)
  return()
endif()
find_package(Torch QUIET)
if(NOT Torch_FOUND)
  message(STATUS "Maniple: LibTorch was not found; maniple::train is left out (Debian: apt-get install libtorch-dev)")
  return()
endif()
set(MANIPLE_HAVE_TORCH ON)
find_package(ZLIB REQUIRED)

add_library(maniple_train)
add_library(maniple::train ALIAS maniple_train)
target_include_directories(maniple_train
  PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
  PRIVATE src)
target_compile_features(maniple_train PUBLIC cxx_std_20)
# SYSTEM: warnings in LibTorch's headers are not ours.
target_include_directories(maniple_train SYSTEM PUBLIC ${TORCH_INCLUDE_DIRS})
target_link_libraries(maniple_train
  PUBLIC maniple_comm ${TORCH_LIBRARIES}
  PRIVATE fmt::fmt ZLIB::ZLIB OpenSSL::Crypto $<BUILD_INTERFACE:nlohmann_json::nlohmann_json>
          $<BUILD_INTERFACE:maniple_warnings>)
# LibTorch's headers take many seconds to read: once for the library.
target_precompile_headers(maniple_train PRIVATE <torch/torch.h> <fmt/format.h>)
# GCC makes the templates that those headers use anew in each file, which takes longer than the file itself: a folder at a time
# (src/train/CMakeLists.txt). While working on the library, -DMANIPLE_UNITY=OFF compiles less after a change.
option(MANIPLE_UNITY "Compile the sources of maniple_train a folder at a time" ON)
set_target_properties(maniple_train PROPERTIES UNITY_BUILD ${MANIPLE_UNITY} UNITY_BUILD_MODE GROUP)
if(MANIPLE_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(maniple_train PRIVATE -Wno-subobject-linkage)  # it takes the files that are put together for headers
endif()
