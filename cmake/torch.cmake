# Finds LibTorch and defines maniple_train, the only library that may use it.
#
# Debian 12 ships LibTorch 1.13 (libtorch-dev). Any later LibTorch up to 2.x works, too:
# -DCMAKE_PREFIX_PATH=/path/to/libtorch. Sets MANIPLE_HAVE_TORCH. Without LibTorch everything else is built, and CMake
# reports what it leaves out.
set(MANIPLE_HAVE_TORCH OFF)
if(NOT MANIPLE_TRAIN)
  return()
endif()
find_package(Torch QUIET)
if(NOT Torch_FOUND)
  message(STATUS "Maniple: LibTorch was not found; maniple::train is left out (Debian: apt-get install libtorch-dev)")
  return()
endif()
if(Torch_VERSION VERSION_LESS 2 AND CMAKE_CXX_COMPILER_ID MATCHES Clang)
  message(STATUS "Maniple: Clang cannot compile the headers of LibTorch ${Torch_VERSION} as C++20; maniple::train is left out. "
                 "GCC can (-DCMAKE_CXX_COMPILER=g++), and so does Clang with LibTorch 2")
  return()
endif()
set(MANIPLE_HAVE_TORCH ON)
find_package(ZLIB REQUIRED)

add_library(maniple_train STATIC)
target_include_directories(maniple_train
  PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
  PRIVATE src)
target_compile_features(maniple_train PUBLIC cxx_std_20)
# SYSTEM suppresses warnings in LibTorch's headers.
target_include_directories(maniple_train SYSTEM PUBLIC ${TORCH_INCLUDE_DIRS})
target_link_libraries(maniple_train
  PUBLIC maniple_comm ${TORCH_LIBRARIES}
  PRIVATE ZLIB::ZLIB $<BUILD_INTERFACE:maniple_openssl_headers> $<BUILD_INTERFACE:nlohmann_json::nlohmann_json>
          $<BUILD_INTERFACE:maniple_warnings>)
# Support GPU tensors if LibTorch does.
if(TARGET torch_cuda)
  # PUBLIC: every target that shares the precompiled headers needs it.
  target_compile_definitions(maniple_train PUBLIC $<BUILD_INTERFACE:MANIPLE_TORCH_CUDA>)
endif()
# LibTorch's macros put __FILE__ into texts that users see; the map removes the build machine's path.
target_compile_options(maniple_train PRIVATE -fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=maniple/)
# LibTorch's headers take many seconds to parse, so the library parses them once.
target_precompile_headers(maniple_train PRIVATE <torch/torch.h>)
# GCC instantiates the templates of those headers in each file, even in an empty one. This takes ten seconds, longer
# than the file itself, so several files are compiled together.
set_target_properties(maniple_train PROPERTIES UNITY_BUILD ${MANIPLE_UNITY} UNITY_BUILD_MODE GROUP)
if(MANIPLE_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC treats the grouped files as headers.
  target_compile_options(maniple_train PRIVATE -Wno-subobject-linkage)
endif()

# maniple_train_sources(GROUP FILES...): adds files that are compiled together with the other files of GROUP. Names in
# their unnamed namespaces must differ within the group.
function(maniple_train_sources group)
  target_sources(maniple_train PRIVATE ${ARGN})
  set_source_files_properties(${ARGN} TARGET_DIRECTORY maniple_train PROPERTIES UNITY_GROUP ${group})
endfunction()

# maniple_train_program(NAME [SOURCES ...] [LIBS ...] [OPTIONS ...]): adds a program that uses LibTorch. Its sources are
# compiled as the object library NAME_object, because an executable has other flags and cannot reuse the precompiled
# headers of maniple_train.
function(maniple_train_program name)
  cmake_parse_arguments(arg "" "" "SOURCES;LIBS;OPTIONS" ${ARGN})
  add_library(${name}_object OBJECT ${arg_SOURCES})
  target_link_libraries(${name}_object PRIVATE maniple_train ${arg_LIBS} maniple_warnings)
  target_compile_options(${name}_object PRIVATE ${arg_OPTIONS})
  target_precompile_headers(${name}_object REUSE_FROM maniple_train)
  add_executable(${name} $<TARGET_OBJECTS:${name}_object>)
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
  target_link_libraries(${name} PRIVATE maniple_train ${arg_LIBS})
endfunction()
