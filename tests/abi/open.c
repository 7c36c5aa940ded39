/* Opens the library by name, as a host does that was built without it, and uses it through its symbols alone.
 * Compiled as C99, and by open_cxx11.cpp as C++11.
 *
 *     open LIBRARY MAP
 */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include <skerry/skerry.h>

static int failed = 0;
static int count = 0;

static void check(int good, const char *name) {
    count += 1;
    failed += !good;
    printf("%s %d - %s\n", good ? "ok" : "not ok", count, name);
}

/* ISO C has no conversion from an object pointer to a function pointer. */
static void get(void *library, const char *name, void *function) {
    void *symbol = dlsym(library, name);
    memcpy(function, &symbol, sizeof symbol);
}

static int resolve_map(void *library, const char *path) {
    char line[256];
    int names = 0;
    int global = 0;
    FILE *map = fopen(path, "r");
    if (map == NULL) return -1;
    while (fgets(line, sizeof line, map) != NULL) {
        char name[200];
        if (strstr(line, "global:") != NULL) global = 1;
        if (strstr(line, "local:") != NULL) global = 0;
        if (global && sscanf(line, " %199[a-z0-9_];", name) == 1 && strncmp(name, "skerry", 6) == 0) {
            names += 1;
            if (dlsym(library, name) == NULL) {
                printf("# no %s\n", name);
                fclose(map);
                return -1;
            }
        }
    }
    fclose(map);
    return names;
}

int main(int argc, char **argv) {
    int32_t (*version)(void);
    const char *(*status_name)(skerry_status);
    skerry_status (*context_create)(const skerry_context_desc *, skerry_context **, skerry_error *);
    void (*context_release)(skerry_context *);
    skerry_context_desc desc = SKERRY_DESC(skerry_context_desc);
    skerry_error error = SKERRY_DESC(skerry_error);
    skerry_context *context = NULL;
    void *library;

    if (argc != 3) return 2;
    library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    check(library != NULL, "the library opens");
    if (library == NULL) {
        printf("# %s\n1..1\n", dlerror());
        return 1;
    }
    check(resolve_map(library, argv[2]) > 20, "every name of the map resolves");
    if (failed != 0) {
        printf("1..%d\n", count);
        return 1;
    }

    get(library, "skerry_version", &version);
    get(library, "skerry_status_name", &status_name);
    get(library, "skerry_context_create", &context_create);
    get(library, "skerry_context_release", &context_release);
    check(version() == SKERRY_API_VERSION, "the version is that of the headers");
    check(strcmp(status_name(SKERRY_ERROR_STATE), "SKERRY_ERROR_STATE") == 0, "statuses have names");
    check(context_create(&desc, &context, &error) == SKERRY_OK && context != NULL, "a context is made from zeroes");
    context_release(context);
    context_release(NULL);
    check(dlclose(library) == 0, "the library closes");

    library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    check(library != NULL, "the library opens again");
    if (library != NULL) dlclose(library);
    printf("1..%d\n", count);
    return failed != 0;
}
