/* The least that moving memory over TCP costs: blocking sockets, one thread each, nothing else.
 *
 *     transport_c receive HOST CONNECTIONS BYTES
 *     transport_c send HOST CONNECTIONS BYTES PORT
 *
 * Lines on input and output are those of transport_ends.py: the receiver says its port, the sender sends once for each
 * line and says how long that took.
 *
 * Each connection carries its share of the bytes from memory to memory, and one byte comes back when all of a share
 * has arrived. Both ends touch their memory before.
 */
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define PIECE_BYTES (4 << 20)

struct share {
    int sock;
    char *memory;
    size_t bytes;
};

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static void *send_share(void *argument) {
    struct share *share = argument;
    char done;
    for (size_t sent = 0; sent < share->bytes;) {
        size_t left = share->bytes - sent;
        ssize_t count = send(share->sock, share->memory + sent, left < PIECE_BYTES ? left : PIECE_BYTES, 0);
        if (count <= 0) fail("send");
        sent += count;
    }
    if (recv(share->sock, &done, 1, 0) != 1) fail("confirmation");
    return NULL;
}

static void *receive_shares(void *argument) {
    struct share *share = argument;
    for (;;) {
        for (size_t received = 0; received < share->bytes;) {
            size_t left = share->bytes - received;
            ssize_t count = recv(share->sock, share->memory + received, left < PIECE_BYTES ? left : PIECE_BYTES, MSG_WAITALL);
            if (count == 0) return NULL;
            if (count < 0) fail("recv");
            received += count;
        }
        if (send(share->sock, "!", 1, MSG_NOSIGNAL) != 1) return NULL;
    }
}

static void run_all(void *(*job)(void *), struct share *shares, int count) {
    pthread_t threads[count];
    for (int index = 0; index < count; index++)
        if (pthread_create(&threads[index], NULL, job, &shares[index])) fail("thread");
    for (int index = 0; index < count; index++) pthread_join(threads[index], NULL);
}

int main(int argc, char **argv) {
    if (argc < 5) {
        fprintf(stderr, "usage: transport_c receive|send HOST CONNECTIONS BYTES [PORT]\n");
        return 2;
    }
    int sending = !strcmp(argv[1], "send"), connections = atoi(argv[3]), on = 1;
    size_t bytes = strtoull(argv[4], NULL, 10);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(argc > 5 ? atoi(argv[5]) : 0)};
    inet_pton(AF_INET, argv[2], &address.sin_addr);
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    madvise(memory, bytes, MADV_HUGEPAGE);
    for (size_t at = 0; at < bytes; at += 4096) memset(memory + at, at >> 12, 4096);
    struct share shares[connections];
    for (int index = 0; index < connections; index++) {
        shares[index].bytes = bytes / connections;
        shares[index].memory = memory + index * shares[index].bytes;
    }
    if (sending) {
        for (int index = 0; index < connections; index++) {
            shares[index].sock = socket(AF_INET, SOCK_STREAM, 0);
            setsockopt(shares[index].sock, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
            if (connect(shares[index].sock, (struct sockaddr *)&address, sizeof address)) fail("connect");
        }
        puts("@{}");
        fflush(stdout);
        for (char line[64]; fgets(line, sizeof line, stdin);) {
            double began_s = now_s();
            run_all(send_share, shares, connections);
            printf("@{\"elapsed_s\": %.9f}\n", now_s() - began_s);
            fflush(stdout);
        }
        return 0;
    }
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    socklen_t size = sizeof address;
    if (bind(listener, (struct sockaddr *)&address, size) || listen(listener, connections)) fail("listen");
    getsockname(listener, (struct sockaddr *)&address, &size);
    printf("@{\"port\": %d}\n", ntohs(address.sin_port));
    fflush(stdout);
    for (int index = 0; index < connections; index++)
        if ((shares[index].sock = accept(listener, NULL, NULL)) < 0) fail("accept");
    run_all(receive_shares, shares, connections);
    return 0;
}
