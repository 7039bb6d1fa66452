# Install rules, and the package that find_package(Maniple) finds. Each component is one line at the end of this file.
include(CMakePackageConfigHelpers)
set(MANIPLE_PACKAGE_DIR ${CMAKE_INSTALL_LIBDIR}/cmake/Maniple)

# maniple_component(NAME [COMPONENTS other ...] [PACKAGES package ...] [STATIC_PACKAGES package ...] [WITH target ...])
# Installs maniple::NAME from the target maniple_NAME or maniple_NAME_shared. COMPONENTS are Maniple components that
# NAME needs. Consumers find PACKAGES with find_package. STATIC_PACKAGES are private dependencies that consumers must
# find only for the static library. BUILD_SHARED_LIBS selects the kind that is installed by default;
# `cmake --install --component static` or `shared` installs the other kind.
function(maniple_component name)
  cmake_parse_arguments(arg "" "" "COMPONENTS;PACKAGES;STATIC_PACKAGES;WITH" ${ARGN})
  foreach(kind static shared)
    set(target maniple_${name})
    set(packages ${arg_PACKAGES} ${arg_STATIC_PACKAGES})
    set(when "")
    if(kind STREQUAL shared)
      set(target maniple_${name}_shared)
      set(packages ${arg_PACKAGES})
    endif()
    get_target_property(alias_of maniple::${name} ALIASED_TARGET)
    if(NOT target STREQUAL alias_of)
      set(when COMPONENT ${kind} EXCLUDE_FROM_ALL)
    endif()
    set_target_properties(${target} PROPERTIES EXPORT_NAME ${name})
    install(TARGETS ${target} ${arg_WITH} EXPORT maniple_${name}_${kind}
            ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} ${when} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} ${when})
    install(EXPORT maniple_${name}_${kind} NAMESPACE maniple:: DESTINATION ${MANIPLE_PACKAGE_DIR}/${kind}
            FILE Maniple-${name}-targets.cmake ${when})
    set(needs ${PROJECT_BINARY_DIR}/cmake/${kind}/Maniple-${name}-needs.cmake)
    file(WRITE ${needs} "set(Maniple_needs_components ${arg_COMPONENTS})\nset(Maniple_needs_packages ${packages})\n")
    install(FILES ${needs} DESTINATION ${MANIPLE_PACKAGE_DIR}/${kind} ${when})
  endforeach()
endfunction()

configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/ManipleConfig.cmake.in
  ${PROJECT_BINARY_DIR}/cmake/ManipleConfig.cmake INSTALL_DESTINATION ${MANIPLE_PACKAGE_DIR})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/cmake/ManipleConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/cmake/ManipleConfig.cmake ${PROJECT_BINARY_DIR}/cmake/ManipleConfigVersion.cmake
        DESTINATION ${MANIPLE_PACKAGE_DIR})
install(DIRECTORY include/maniple DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(FILES LICENSE README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY docs DESTINATION ${CMAKE_INSTALL_DOCDIR} FILES_MATCHING PATTERN "*.md" PATTERN "*.svg" PATTERN site EXCLUDE)
if(TARGET maniple)
  install(TARGETS maniple RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

maniple_component(comm PACKAGES Threads STATIC_PACKAGES fmt)
set_target_properties(maniple_start PROPERTIES EXPORT_NAME start)
maniple_component(launch COMPONENTS comm STATIC_PACKAGES fmt WITH maniple_start)
if(MANIPLE_HAVE_TORCH)
  maniple_component(train COMPONENTS comm PACKAGES Torch STATIC_PACKAGES ZLIB)
endif()
