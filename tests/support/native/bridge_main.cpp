// Behind runtime/backends/cpp/bridge.cpp: its jobs on a pool of three threads, many at a time, as XLA might schedule them.
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

static std::mutex mutex;
static std::condition_variable changed;
static std::deque<std::pair<XLA_FFI_Task *, void *>> scheduled;
static std::atomic<int> asked{0};
static bool stopped;

static XLA_FFI_Error *schedule(XLA_FFI_ThreadPool_Schedule_Args *args) {
    if (++asked % 7 == 0) return (XLA_FFI_Error *)1;  // a pool may refuse
    std::lock_guard<std::mutex> lock(mutex);
    scheduled.push_back({args->task, args->data});
    changed.notify_one();
    return nullptr;
}
static XLA_FFI_Error *count(XLA_FFI_ThreadPool_NumThreads_Args *args) { return *args->num_threads = 3, nullptr; }
static void drop(XLA_FFI_Error_Destroy_Args *) {}

static void serve() {
    for (;;) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [] { return stopped || !scheduled.empty(); });
        if (scheduled.empty()) return;
        auto [task, data] = scheduled.front();
        scheduled.pop_front();
        lock.unlock();
        task(data);
    }
}

struct Items {
    std::atomic<int> next{0};
    std::vector<int> done;
};

static void take(void *task, int64_t) {
    Items *items = (Items *)task;
    for (int i; (i = items->next++) < (int)items->done.size(); items->done[i]++)
        if (i % 8 == 5) std::this_thread::sleep_for(std::chrono::microseconds(200));  // longer than the caller spins
}

static std::atomic<int> wrong{0};

static void call(const XLA_FFI_Api *api, int seed) {
    Pool pool = {api, nullptr};
    if (threads_of(&pool) != 3) wrong++;
    for (int n = 0; n < 400; n++) {
        Items items;
        items.done.assign((n * 7 + seed) % 23, 0);
        run(&pool, take, &items, 1 + (n + seed) % 6);
        for (int times : items.done) wrong += times != 1;
    }
}

int main() {
    XLA_FFI_Api api = {};
    api.XLA_FFI_ThreadPool_Schedule = schedule;
    api.XLA_FFI_ThreadPool_NumThreads = count;
    api.XLA_FFI_Error_Destroy = drop;
    std::vector<std::thread> pool, callers;
    for (int i = 0; i < 3; i++) pool.emplace_back(serve);
    for (int i = 0; i < 5; i++) callers.emplace_back(call, &api, i);
    for (auto &t : callers) t.join();
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopped = true;
    }
    changed.notify_all();
    for (auto &t : pool) t.join();
    return wrong ? 1 : 0;
}
