/* A program that was built without the library and opens it at run time: what a runtime does that offers Skerry as an option.
 *
 *     06_dlopen [PATH]
 *
 * Only headers are needed to compile it. Functions are looked up once, into a table; whatever a version lacks stays
 * NULL there, so that a program can do without it. */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#include <skerry/skerry.h>

/* Types are those of the header, so a changed signature does not compile. */
typedef struct functions {
    int32_t (*version)(void);
    const char *(*build_text)(void);
    const char *(*status_name)(skerry_status);
    skerry_status (*context_create)(const skerry_context_desc *, skerry_context **, skerry_error *);
    void (*context_release)(skerry_context *);
    skerry_status (*context_get_device)(skerry_context *, int32_t, skerry_device_info *, skerry_error *);
    skerry_status (*cache_plan)(skerry_context *, const skerry_cache_desc *, skerry_plan_info *, skerry_error *);
} functions;

#define NAME(field) {"skerry_" #field, offsetof(functions, field)}
static const struct {
    const char *symbol;
    size_t offset;
} names[] = {NAME(version),         NAME(build_text),         NAME(status_name), NAME(context_create),
             NAME(context_release), NAME(context_get_device), NAME(cache_plan)};

/* ISO C has no conversion from an object pointer to a function pointer; the copy of its bytes is what POSIX promises to work. */
static int resolve(void *library, functions *table) {
    size_t i;
    memset(table, 0, sizeof *table);
    for (i = 0; i < sizeof names / sizeof names[0]; ++i) {
        void *symbol = dlsym(library, names[i].symbol);
        if (symbol == NULL) {
            fprintf(stderr, "the library has no %s\n", names[i].symbol);
            return 1;
        }
        memcpy((char *)table + names[i].offset, &symbol, sizeof symbol);
    }
    return 0;
}

int main(int argc, char **argv) {
    /* Before 1.0 every minor has a name of its own, so a library that does not fit is not found rather than misread. */
    const char *path = argc > 1 ? argv[1] : "libskerry.so.0.1";
    skerry_layer_desc layer = SKERRY_DESC(skerry_layer_desc);
    const skerry_layer_desc *layers[1];
    skerry_cache_desc desc = SKERRY_DESC(skerry_cache_desc);
    skerry_budget_desc budget = SKERRY_DESC(skerry_budget_desc);
    skerry_plan_info plan = SKERRY_DESC(skerry_plan_info);
    skerry_device_info device = SKERRY_DESC(skerry_device_info);
    skerry_error error = SKERRY_DESC(skerry_error);
    skerry_context *context = NULL;
    functions skerry;
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    if (resolve(library, &skerry) != 0) return 1;
    /* SKERRY_VERSION_CHECK() calls skerry_version by name; through a table its rule before 1.0 is this. */
    if (skerry.version() / 1000 != SKERRY_API_VERSION / 1000) {
        fprintf(stderr, "version %d does not fit the headers\n", (int)skerry.version());
        return 1;
    }
    if (skerry.context_create(NULL, &context, &error) < 0 || skerry.context_get_device(context, 0, &device, &error) < 0) return 1;
    printf("%s, on %s\n", skerry.build_text(), device.name);

    layer.kv_heads = 8;
    layer.query_heads = 32;
    layer.key_dim = 128;
    layers[0] = &layer;
    budget.length_tokens = 4096;
    desc.layers = layers;
    desc.layer_count = 1;
    desc.budget = &budget;
    if (skerry.cache_plan(context, &desc, &plan, &error) < 0) {
        fprintf(stderr, "%s: %s\n", skerry.status_name(error.status), error.message);
        return 1;
    }
    printf("a layer of 8 heads, 4,096 tokens in 16 bits: %lu bytes\n", (unsigned long)plan.full_cache_bytes);
    skerry.context_release(context);
    return plan.full_cache_bytes == 8ul * 4096 * 2 * 128 * 2 && dlclose(library) == 0 ? 0 : 1;
}
