# How all of our targets are compiled, and where programs land.
include(GNUInstallDirs)
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
# A shared library exports what is marked: see maniple/export.h.
set(CMAKE_CXX_VISIBILITY_PRESET hidden)
set(CMAKE_VISIBILITY_INLINES_HIDDEN ON)
set(CMAKE_CXX_FLAGS_RELEASE "-O3 -DNDEBUG -g1")

# `maniple` itself is in build/bin; examples, tests and peer programs in a folder of their own below it.
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
macro(maniple_programs_in folder)
  set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin/${folder})
endmacro()

find_program(MANIPLE_CCACHE ccache)
mark_as_advanced(MANIPLE_CCACHE)
if(MANIPLE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Precompiled headers need these allowances.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${MANIPLE_CCACHE})
endif()

add_library(maniple_warnings INTERFACE)
target_compile_options(maniple_warnings INTERFACE -Wall -Wextra -Wshadow -Wnon-virtual-dtor -Wcast-qual -Wpedantic
  $<$<COMPILE_LANG_AND_ID:CXX,Clang>:-Wthread-safety>  # the annotations of comm/base/mutex.h
  $<$<BOOL:${MANIPLE_WERROR}>:-Werror>)

if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 15)
  # GCC 12 to 14 warn wrongly about std::string that is concatenated, assigned or moved (its bugs 105651, 105329) and
  # about std::vector<bool> that grows, on one processor here and on another there.
  target_compile_options(maniple_warnings INTERFACE -Wno-restrict -Wno-array-bounds -Wno-stringop-overflow
    -Wno-stringop-overread)
endif()

if(MANIPLE_SANITIZE)
  # With sanitizers GCC 12 takes members of std::regex for uninitialised.
  target_compile_options(maniple_warnings INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  # vptr: that check opens a pipe for each look, and reports nonsense when a test has used up all descriptors.
  add_compile_options(-fsanitize=${MANIPLE_SANITIZE} -fno-sanitize=vptr -fno-omit-frame-pointer -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${MANIPLE_SANITIZE})
endif()

# Fuzz targets add -fsanitize=fuzzer themselves; the library under them only needs to count edges. Tests do not:
# MANIPLE_UNCOUNTED.
set(MANIPLE_UNCOUNTED "")
if(MANIPLE_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES Clang)
    message(FATAL_ERROR "MANIPLE_FUZZ needs Clang (libFuzzer); this is ${CMAKE_CXX_COMPILER_ID}. "
                        "Use: cmake --preset asan-ubsan")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link)
  set(MANIPLE_UNCOUNTED -fno-sanitize-coverage=edge,indirect-calls,inline-8bit-counters,pc-table,stack-depth,trace-cmp)
endif()

# Files of one folder are compiled together, which takes a third of the time. While working on the library,
# -DMANIPLE_UNITY=OFF compiles less after a change.
option(MANIPLE_UNITY "Compile sources in groups" ON)

# maniple_compile_in_groups(TARGET): for a target whose sources are all known. Names in the unnamed namespaces of a
# folder must differ.
function(maniple_compile_in_groups target)
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${MANIPLE_UNITY} UNITY_BUILD_MODE GROUP)
  if(MANIPLE_UNITY AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # It takes the files that are put together for headers.
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
  get_target_property(sources ${target} SOURCES)
  get_target_property(home ${target} SOURCE_DIR)
  foreach(source IN LISTS sources)
    get_filename_component(folder ${source} ABSOLUTE BASE_DIR ${home})
    get_filename_component(folder ${folder} DIRECTORY)
    get_filename_component(folder ${folder} NAME)
    set_source_files_properties(${source} TARGET_DIRECTORY ${target} PROPERTIES UNITY_GROUP ${folder})
  endforeach()
endfunction()
