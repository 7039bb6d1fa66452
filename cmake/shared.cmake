# Links the shared libraries libmaniple.so (comm and launch) and libmaniple_train.so from the objects of the static
# libraries, so nothing is compiled twice. `maniple`, the tests and the peer programs use internals and always link the
# static libraries.
#
# BUILD_SHARED_LIBS selects the kind of maniple::comm, maniple::launch and maniple::train, in this build and in the
# package (see install.cmake).
function(maniple_shared_library target file)
  cmake_parse_arguments(arg "" "" "OF" ${ARGN})
  add_library(${target} SHARED)
  foreach(library IN LISTS arg_OF)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${library}>)
  endforeach()
  target_include_directories(${target}
    PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  target_compile_features(${target} PUBLIC cxx_std_20)
  # Before 1.0 a minor version may change the binary interface. $ORIGIN lets the libraries find each other after the
  # prefix is moved.
  set(interface ${PROJECT_VERSION_MAJOR})
  if(interface EQUAL 0)
    set(interface 0.${PROJECT_VERSION_MINOR})
  endif()
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${file} VERSION ${PROJECT_VERSION} SOVERSION ${interface} LINKER_LANGUAGE CXX
    BUILD_RPATH $ORIGIN INSTALL_RPATH $ORIGIN INSTALL_RPATH_USE_LINK_PATH ON)
  # The compiler does not hide instantiated templates of the C++ library; the version script does.
  set(exports ${PROJECT_SOURCE_DIR}/cmake/exports.map)
  target_link_options(${target} PRIVATE LINKER:--version-script=${exports})
  set_target_properties(${target} PROPERTIES LINK_DEPENDS ${exports})
  if(NOT MANIPLE_SANITIZE AND NOT MANIPLE_FUZZ)
    target_link_options(${target} PRIVATE LINKER:-z,defs)  # reports a missing export mark here
  endif()
  # A test uses the shared libraries too.
  if(NOT BUILD_SHARED_LIBS AND (NOT MANIPLE_TESTS OR MANIPLE_SANITIZE))
    set_target_properties(${target} PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
endfunction()

maniple_shared_library(maniple_comm_shared maniple OF maniple_comm maniple_launch)
target_link_libraries(maniple_comm_shared PUBLIC Threads::Threads PRIVATE fmt::fmt ${CMAKE_DL_LIBS})
add_library(maniple_launch_shared INTERFACE)
target_link_libraries(maniple_launch_shared INTERFACE maniple_start maniple_comm_shared)
set(libraries comm launch)
if(MANIPLE_HAVE_TORCH)
  maniple_shared_library(maniple_train_shared maniple_train OF maniple_train)
  target_include_directories(maniple_train_shared SYSTEM PUBLIC ${TORCH_INCLUDE_DIRS})
  target_link_libraries(maniple_train_shared PUBLIC maniple_comm_shared ${TORCH_LIBRARIES} PRIVATE ZLIB::ZLIB)
  list(APPEND libraries train)
endif()
foreach(library IN LISTS libraries)
  if(BUILD_SHARED_LIBS)
    add_library(maniple::${library} ALIAS maniple_${library}_shared)
  else()
    add_library(maniple::${library} ALIAS maniple_${library})
  endif()
endforeach()
