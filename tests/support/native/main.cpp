// A program around one kernel, behind cpp_threads.cpp: reads a call from a file, runs it, writes every array back.
// The file: kind, threads, arrays, links; the size of each array; each link; the bytes of the arrays.
#include <stdio.h>
#include <stdlib.h>

extern "C" __attribute__((weak)) int64_t frisket_forward(const Call *);  // one of the two is there
extern "C" __attribute__((weak)) int64_t frisket_backward(const Call *);

int main(int, char **names) {
    FILE *given = fopen(names[1], "rb"), *back = fopen(names[2], "wb");
    int64_t head[4];
    if (!given || !back || fread(head, 8, 4, given) != 4) return 2;
    const int64_t kind = head[0], threads = head[1], arrays = head[2], links = head[3];
    int64_t *sizes = (int64_t *)malloc(8 * arrays), *link = (int64_t *)malloc(24 * links);
    if (fread(sizes, 8, arrays, given) != (size_t)arrays || fread(link, 24, links, given) != (size_t)links) return 2;
    char **data = (char **)malloc(sizeof(char *) * arrays);
    for (int64_t i = 0; i < arrays; i++) {
        data[i] = (char *)malloc(sizes[i]);  // an end of its own, for the sanitizer to watch
        if (fread(data[i], 1, sizes[i], given) != (size_t)sizes[i]) return 2;
    }
    for (int64_t i = 0; i < links; i++) ((char **)data[link[3 * i]])[link[3 * i + 1]] = data[link[3 * i + 2]];
    Call *call = (Call *)data[0];
    call->threads = threads;
    call->parallel = threads > 1 ? frisket_own : nullptr;
    const int64_t failed = kind ? frisket_backward(call) : frisket_forward(call);
    if (failed) return (int)failed;
    for (int64_t i = 0; i < arrays; i++) fwrite(data[i], 1, sizes[i], back);
    for (int64_t i = 0; i < arrays; i++) free(data[i]);
    free(data), free(sizes), free(link);
    fclose(given), fclose(back);
    return 0;
}
