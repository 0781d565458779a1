// Threads for native kernels: torch's OpenMP ones where they can be had, otherwise a pool of ours.
// cpp_build.py puts in front: the text of lowering/kernels/cpp/call.py.
#include <pthread.h>
#include <signal.h>

// -- a pool of ours ------------------------------------------------------------------------------------------------

struct Pool {
    pthread_mutex_t busy;   // held by whoever runs a job
    pthread_mutex_t mutex;  // of everything below
    pthread_cond_t wake, done;
    Work work;
    void *task;
    int64_t threads;  // started so far
    int64_t wanted;   // workers that may still join the job; 0 when there is none
    int64_t joined;
    int64_t running;
    int64_t jobs;  // how many there have been
};

static const Pool FRESH = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER,
                           PTHREAD_COND_INITIALIZER, nullptr, nullptr, 0, 0, 0, 0, 0};
static Pool pool = FRESH;
static int forked;
static const int SPINS = 1000;  // some 20 microseconds: the next job of a step often comes at once

static void pause_a_little() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Waits a little for a word to change; whoever sleeps is woken much later.
static void spin_while(const int64_t *word, int64_t value) {
    for (int i = 0; i < SPINS && __atomic_load_n(word, __ATOMIC_RELAXED) == value; ++i) pause_a_little();
}

static void *serve(void *) {
    pthread_mutex_lock(&pool.mutex);
    for (int64_t seen = 0;;) {
        if (!pool.wanted) {
            pthread_mutex_unlock(&pool.mutex);
            spin_while(&pool.jobs, seen);
            pthread_mutex_lock(&pool.mutex);
            while (!pool.wanted) pthread_cond_wait(&pool.wake, &pool.mutex);
        }
        seen = pool.jobs;
        --pool.wanted, ++pool.running;
        int64_t worker = ++pool.joined;
        Work work = pool.work;
        void *task = pool.task;
        pthread_mutex_unlock(&pool.mutex);
        work(task, worker);
        pthread_mutex_lock(&pool.mutex);
        if (__atomic_sub_fetch(&pool.running, 1, __ATOMIC_RELAXED) == 0) pthread_cond_signal(&pool.done);
    }
}

static void start(int64_t threads) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the threads of Python
    for (pthread_t thread; pool.threads < threads; ++pool.threads) {
        if (pthread_create(&thread, nullptr, serve, nullptr)) break;  // then there are fewer
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// A thread that finds the pool at work does everything itself.
extern "C" void frisket_own(void *, Work work, void *task, int64_t workers) {
    if (workers < 2 || pthread_mutex_trylock(&pool.busy)) return work(task, 0);
    pthread_mutex_lock(&pool.mutex);
    start(workers - 1);
    pool.work = work, pool.task = task;
    pool.joined = 0, pool.wanted = workers - 1 < pool.threads ? workers - 1 : pool.threads;
    __atomic_add_fetch(&pool.jobs, 1, __ATOMIC_RELAXED);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.mutex);
    work(task, 0);
    pthread_mutex_lock(&pool.mutex);
    pool.wanted = 0;  // all items are taken: who comes now is too late
    if (pool.running) {
        int64_t running = pool.running;
        pthread_mutex_unlock(&pool.mutex);
        spin_while(&pool.running, running);
        pthread_mutex_lock(&pool.mutex);
        while (pool.running) pthread_cond_wait(&pool.done, &pool.mutex);
    }
    pthread_mutex_unlock(&pool.mutex);
    pthread_mutex_unlock(&pool.busy);
}

// A forked child has none of its parent's threads, and locks may be held by threads it does not have.
static void after_fork() {
    pool = FRESH;
    forked = 1;
}

__attribute__((constructor)) static void watch_forks() { pthread_atfork(nullptr, nullptr, after_fork); }

// -- the threads of an OpenMP library ------------------------------------------------------------------------------

struct OpenMP {
    void (*parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags);  // GOMP_parallel
    int (*number)();                                                                       // omp_get_thread_num
};

struct Body {
    const OpenMP *openmp;
    Work work;
    void *task;
};

static void run_body(void *data) {
    Body *body = (Body *)data;
    body->work(body->task, body->openmp->number());
}

extern "C" void frisket_openmp(void *openmp, Work work, void *task, int64_t workers) {
    if (forked) return frisket_own(nullptr, work, task, workers);  // GNU's would wait for the parent's threads
    Body body = {(const OpenMP *)openmp, work, task};
    body.openmp->parallel(run_body, &body, (unsigned)workers, 0);
}

extern "C" void frisket_set_forked() { forked = 1; }
