/* A wide-area network between network namespaces, in user space: what `laboratory.py` starts and steers.
 *
 *   emulator CONTROL_FD BURST_US SEED NAMESPACE_FD:SITE:ADDRESS...
 *
 * Each namespace gets the TUN device `wan0` with ADDRESS in 10.0.0.0/8. Namespaces of one site reach each other at
 * once. From each site to each other one there is one line, which all their namespaces share:
 *
 *   arriving packets -> drop-tail queue -> line (rate) -> loss of single segments -> constant delay -> delivery
 *
 * The kernel hands over and takes TCP super-packets of up to 64 KiB (TUN with VNET_HDR and TSO), as a network card with
 * segmentation offload does. Queue, loss and rate are those of the segments that such a packet stands for. On the line
 * a super-packet is cut into pieces of at most BURST_US of line time, so that a slow line delivers little by little.
 *
 * CONTROL_FD is a datagram socket: one command per datagram, one answer each ("ok ...", "error ..."). The program ends
 * when the other end is closed, and with it go the devices. Commands:
 *
 *   set FROM TO RATE_BITS_PER_S DELAY_NS QUEUE_BYTES LOSS BLACKHOLE   rate 0: the line stands still, the queue is kept
 *   count FROM TO                                                     counters, as JSON
 *   kill COUNT PORT                                                   RST to both ends of that many TCP connections
 *                                                                     between sites, those with the most bytes first;
 *                                                                     COUNT or PORT 0: any
 *
 * Only IPv4 passes. A packet occupies the line for 38 bytes more than its IP length: Ethernet's header, checksum,
 * preamble and gap. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <linux/virtio_net.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum {
    MOST_SITES = 8,
    MOST_HOSTS = 64,
    MTU_BYTES = 1500,
    FRAMING_BYTES = 38,
    VNET_BYTES = sizeof(struct virtio_net_hdr),
    MOST_BYTES = VNET_BYTES + 65536,
    SMALL_BYTES = 2048,
    MOST_HEADER_BYTES = 120,
    READS_PER_TURN = 32,
    FLOW_BUCKETS = 4096,
    TCP = 6,
    /* What a sleeping program is late by, measured on a virtual machine: a packet that is due so soon goes at once. */
    EARLY_NS = 100000,
};
enum { FIN = 0x01, SYN = 0x02, RST = 0x04, PSH = 0x08, ACK = 0x10, CWR = 0x80 };

/* A TCP connection between sites; end 0 sent the first packet that was seen. Flows are never freed: a laboratory lives
 * for minutes, and packets in the queues point to them. */
struct flow {
    struct flow *bucket_next, *younger;
    uint64_t bytes;
    uint32_t address[2], next_sequence[2], acknowledged[2];
    uint16_t port[2];
    bool ended[2], killed;
};

/* What a TUN device gave: a virtio-net header, then one IP packet or a super-packet of several segments. */
struct packet {
    struct flow *flow; /* NULL: not TCP */
    uint32_t references, length;
    uint16_t header_bytes, segment_bytes, segments; /* of IP and TCP; 0 and 1 segment where it is no super-packet */
    _Alignas(8) uint8_t data[]; /* directly behind the fields: they are set as a whole */
};

/* Segments [first, first + count) of a packet; `at_ns`: when they came, or when they are due. */
struct piece {
    struct packet *packet;
    uint64_t at_ns;
    uint16_t first, count;
};

struct fifo {
    struct piece *pieces;
    size_t capacity, head, length; /* the capacity is a power of two */
};

struct line {
    double rate_bits_per_s, loss;
    uint64_t delay_ns, queue_bytes;
    bool blackhole;

    struct fifo queue, flight;
    uint64_t queued_bytes, free_ns, last_due_ns;
    uint16_t crossing; /* segments of the queue's head that are on the line until `free_ns` */

    uint64_t offered_bytes, offered_segments, carried_bytes, carried_segments;
    uint64_t lost_segments, dropped_segments, blackholed_segments;
};

struct host {
    int tun;
    unsigned site;
    uint32_t address;
};

static struct host hosts[MOST_HOSTS];
static unsigned host_count;
static struct line lines[MOST_SITES][MOST_SITES];
static struct flow *buckets[FLOW_BUCKETS], *oldest, *youngest;
static uint64_t burst_ns, random_state, refused_writes;

static void fail(const char *what)
{
    fprintf(stderr, "emulator: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* Uniform in [0, 1): Marsaglia's xorshift64. */
static double draw(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (double)(random_state >> 11) / 9007199254740992.0;
}

static void *allocate(size_t nbytes)
{
    void *memory = malloc(nbytes);
    if (memory == NULL)
        fail("no memory");
    return memory;
}

static struct piece *fifo_head(struct fifo *fifo)
{
    return fifo->length ? &fifo->pieces[fifo->head] : NULL;
}

static void fifo_push(struct fifo *fifo, struct piece piece)
{
    if (fifo->length == fifo->capacity) {
        size_t capacity = fifo->capacity ? 2 * fifo->capacity : 1024;
        struct piece *pieces = allocate(capacity * sizeof *pieces);
        for (size_t i = 0; i < fifo->length; i++)
            pieces[i] = fifo->pieces[(fifo->head + i) & (fifo->capacity - 1)];
        free(fifo->pieces);
        *fifo = (struct fifo){pieces, capacity, 0, fifo->length};
    }
    fifo->pieces[(fifo->head + fifo->length++) & (fifo->capacity - 1)] = piece;
}

static void fifo_pop(struct fifo *fifo)
{
    fifo->head = (fifo->head + 1) & (fifo->capacity - 1);
    fifo->length--;
}

static void release(struct packet *packet)
{
    if (--packet->references == 0)
        free(packet);
}

/* --- bytes of packets --- */

static uint16_t get16(const uint8_t *at)
{
    return (uint16_t)(at[0] << 8 | at[1]);
}

static uint32_t get32(const uint8_t *at)
{
    return (uint32_t)get16(at) << 16 | get16(at + 2);
}

static void put16(uint8_t *at, uint32_t value)
{
    at[0] = (uint8_t)(value >> 8);
    at[1] = (uint8_t)value;
}

static void put32(uint8_t *at, uint32_t value)
{
    put16(at, value >> 16);
    put16(at + 2, value);
}

/* RFC 1071, without the final complement. */
static uint16_t ones_sum(const uint8_t *at, size_t nbytes, uint32_t sum)
{
    for (; nbytes > 1; at += 2, nbytes -= 2)
        sum += get16(at);
    while (sum >> 16)
        sum = (sum & 0xffff) + (sum >> 16);
    return (uint16_t)sum;
}

/* The IP length of one segment. */
static uint32_t segment_length(const struct packet *packet, unsigned index)
{
    uint32_t whole = packet->length - VNET_BYTES;
    if (packet->segments == 1)
        return whole;
    uint32_t before = index * packet->segment_bytes, payload = whole - packet->header_bytes;
    uint32_t left = payload - before;
    return packet->header_bytes + (left < packet->segment_bytes ? left : packet->segment_bytes);
}

static uint64_t piece_bytes(const struct piece *piece, unsigned count)
{
    uint64_t sum = 0;
    for (unsigned i = 0; i < count; i++)
        sum += segment_length(piece->packet, piece->first + i);
    return sum;
}

/* --- delivery --- */

static void write_out(int tun, const struct iovec *parts, int count)
{
    if (writev(tun, parts, count) < 0)
        refused_writes++;
}

/* A RST to one end: in its window for sure only if it carries the very next sequence number (RFC 5961), which is the
 * last one that this end has acknowledged. */
static void reset_end(const struct flow *flow, int end)
{
    int peer = !end;
    uint8_t raw[VNET_BYTES + 40] = {0}, *ip = raw + VNET_BYTES, *tcp = ip + 20;
    ip[0] = 0x45;
    put16(ip + 2, 40);
    ip[8] = 64;
    ip[9] = TCP;
    put32(ip + 12, flow->address[peer]);
    put32(ip + 16, flow->address[end]);
    put16(ip + 10, (uint16_t)~ones_sum(ip, 20, 0));
    put16(tcp, flow->port[peer]);
    put16(tcp + 2, flow->port[end]);
    put32(tcp + 4, flow->acknowledged[end]);
    put32(tcp + 8, flow->next_sequence[end]);
    tcp[12] = 5 << 4;
    tcp[13] = RST | ACK;
    put16(tcp + 16, (uint16_t)~ones_sum(tcp, 20, ones_sum(ip + 12, 8, TCP + 20)));
    for (unsigned i = 0; i < host_count; i++)
        if (hosts[i].address == flow->address[end])
            write_out(hosts[i].tun, &(struct iovec){raw, sizeof raw}, 1);
}

static void deliver(const struct piece *piece)
{
    struct packet *packet = piece->packet;
    uint8_t *ip = packet->data + VNET_BYTES;
    if (packet->flow != NULL && packet->flow->killed)
        return;
    unsigned to = 0;
    while (to < host_count && hosts[to].address != get32(ip + 16))
        to++;
    if (to == host_count)
        return;
    if (piece->count == packet->segments) {
        write_out(hosts[to].tun, &(struct iovec){packet->data, packet->length}, 1);
        return;
    }
    /* A part of a super-packet: the same headers with the part's place in the stream, and its payload. */
    uint8_t head[VNET_BYTES + MOST_HEADER_BYTES];
    size_t header_bytes = packet->header_bytes, ip_bytes = (ip[0] & 15) * 4u;
    uint32_t offset = (uint32_t)piece->first * packet->segment_bytes;
    uint32_t payload = (uint32_t)(piece_bytes(piece, piece->count) - piece->count * header_bytes);
    memcpy(head, packet->data, VNET_BYTES + header_bytes);
    struct virtio_net_hdr *vnet = (void *)head;
    uint8_t *own_ip = head + VNET_BYTES, *tcp = own_ip + ip_bytes;
    put16(own_ip + 2, (uint32_t)header_bytes + payload);
    put16(own_ip + 4, get16(own_ip + 4) + piece->first);
    put16(own_ip + 10, 0);
    put16(own_ip + 10, (uint16_t)~ones_sum(own_ip, ip_bytes, 0));
    put32(tcp + 4, get32(tcp + 4) + offset);
    if (piece->first > 0)
        tcp[13] &= (uint8_t)~CWR;
    if (piece->first + piece->count < packet->segments)
        tcp[13] &= (uint8_t)~(PSH | FIN);
    /* The checksum of TCP stays to be filled in (NEEDS_CSUM), so the receiving kernel takes the payload as intact. */
    if (piece->count == 1)
        vnet->gso_type = vnet->gso_size = vnet->hdr_len = 0;
    struct iovec parts[] = {{head, VNET_BYTES + header_bytes}, {ip + header_bytes + offset, payload}};
    write_out(hosts[to].tun, parts, 2);
}

/* --- the line --- */

/* What has crossed the line loses its unlucky segments; the others fly. */
static void take_off(struct line *line, const struct piece *piece, unsigned count)
{
    uint64_t due_ns = line->free_ns + line->delay_ns;
    if (due_ns < line->last_due_ns)
        due_ns = line->last_due_ns; /* the delay was made shorter: nothing overtakes */
    line->last_due_ns = due_ns;
    struct piece flying = {piece->packet, due_ns, piece->first, 0};
    for (unsigned i = 0; i < count; i++) {
        if (line->loss <= 0 || draw() >= line->loss) {
            flying.count++;
            line->carried_segments++;
            line->carried_bytes += segment_length(piece->packet, piece->first + i);
            continue;
        }
        line->lost_segments++;
        if (flying.count > 0) {
            piece->packet->references++;
            fifo_push(&line->flight, flying);
        }
        flying = (struct piece){piece->packet, due_ns, (uint16_t)(piece->first + i + 1), 0};
    }
    if (flying.count > 0) {
        piece->packet->references++;
        fifo_push(&line->flight, flying);
    }
}

static double line_ns(const struct line *line, const struct piece *piece, unsigned count)
{
    double bits = 8.0 * (double)(piece_bytes(piece, count) + (uint64_t)count * FRAMING_BYTES);
    return bits * 1e9 / line->rate_bits_per_s;
}

/* As many segments as cross in the burst time, one at least. Only the last segment of a packet is shorter. */
static unsigned segments_at_once(const struct line *line, const struct piece *piece)
{
    double fit = (double)burst_ns / line_ns(line, piece, 1);
    return fit >= piece->count ? piece->count : fit < 1 ? 1 : (unsigned)fit;
}

/* Moves everything that is due by `now`. Returns when there is more to do. */
static uint64_t advance(struct line *line, uint64_t now)
{
    uint64_t next_ns = UINT64_MAX;
    struct piece *head;
    while ((head = fifo_head(&line->queue)) != NULL) {
        if (line->blackhole) {
            line->blackholed_segments += head->count;
            line->queued_bytes -= piece_bytes(head, head->count);
            line->crossing = 0;
            release(head->packet);
            fifo_pop(&line->queue);
            continue;
        }
        if (line->crossing == 0) {
            if (line->rate_bits_per_s <= 0)
                break;
            line->crossing = (uint16_t)segments_at_once(line, head);
            uint64_t start_ns = line->free_ns > head->at_ns ? line->free_ns : head->at_ns;
            line->free_ns = start_ns + (uint64_t)line_ns(line, head, line->crossing);
        }
        if (line->free_ns > now) {
            next_ns = line->free_ns + line->delay_ns; /* in between nobody needs to know */
            break;
        }
        take_off(line, head, line->crossing);
        line->queued_bytes -= piece_bytes(head, line->crossing);
        head->first = (uint16_t)(head->first + line->crossing);
        head->count = (uint16_t)(head->count - line->crossing);
        line->crossing = 0;
        if (head->count == 0) {
            release(head->packet);
            fifo_pop(&line->queue);
        }
    }
    while ((head = fifo_head(&line->flight)) != NULL && head->at_ns <= now + EARLY_NS) {
        deliver(head);
        release(head->packet);
        fifo_pop(&line->flight);
    }
    if (head != NULL && head->at_ns < next_ns)
        next_ns = head->at_ns;
    return next_ns;
}

static void arrive(struct line *line, struct packet *packet, uint64_t at_ns)
{
    advance(line, at_ns);
    struct piece piece = {packet, at_ns, 0, 0};
    for (unsigned i = 0; i < packet->segments; i++) {
        uint32_t nbytes = segment_length(packet, i);
        line->offered_bytes += nbytes;
        line->offered_segments++;
        /* A packet that finds the line idle needs no queue. */
        bool fits = line->queued_bytes == 0 || line->queued_bytes + nbytes <= line->queue_bytes;
        if (fits && !line->blackhole) {
            line->queued_bytes += nbytes;
            piece.count++;
            continue;
        }
        if (line->blackhole)
            line->blackholed_segments++;
        else
            line->dropped_segments++;
        if (piece.count > 0) {
            packet->references++;
            fifo_push(&line->queue, piece);
        }
        piece = (struct piece){packet, at_ns, (uint16_t)(i + 1), 0};
    }
    if (piece.count > 0) {
        packet->references++;
        fifo_push(&line->queue, piece);
    }
}

/* --- connections --- */

/* The connection of a TCP packet, and which end sent it. */
static struct flow *flow_of(const uint8_t *ip, const uint8_t *tcp, int *sender)
{
    uint32_t from = get32(ip + 12), to = get32(ip + 16);
    uint16_t from_port = get16(tcp), to_port = get16(tcp + 2);
    uint32_t hash = (from ^ to) * 2654435761u ^ (uint32_t)(from_port ^ to_port) * 40503u;
    struct flow **bucket = &buckets[hash % FLOW_BUCKETS], *flow;
    for (flow = *bucket; flow != NULL; flow = flow->bucket_next)
        for (int end = 0; end < 2; end++)
            if (flow->address[end] == from && flow->address[!end] == to && flow->port[end] == from_port &&
                flow->port[!end] == to_port) {
                *sender = end;
                return flow;
            }
    flow = allocate(sizeof *flow);
    *flow = (struct flow){.bucket_next = *bucket, .address = {from, to}, .port = {from_port, to_port}};
    *bucket = flow;
    if (youngest != NULL)
        youngest->younger = flow;
    else
        oldest = flow;
    youngest = flow;
    *sender = 0;
    return flow;
}

/* Notes where the connection stands. False: it was killed, and what its end sent goes nowhere. */
static bool track(struct packet *packet)
{
    const uint8_t *ip = packet->data + VNET_BYTES, *tcp = ip + (ip[0] & 15) * 4u;
    uint8_t flags = tcp[13];
    int sender;
    struct flow *flow = packet->flow = flow_of(ip, tcp, &sender);
    flow->bytes += packet->length;
    if ((flags & (SYN | ACK)) == SYN) /* the same ports are used again */
        flow->ended[0] = flow->ended[1] = flow->killed = false;
    uint32_t payload = packet->length - VNET_BYTES - (uint32_t)(tcp - ip) - (tcp[12] >> 4) * 4u;
    uint32_t next = get32(tcp + 4) + payload + !!(flags & SYN) + !!(flags & FIN);
    if ((int32_t)(next - flow->next_sequence[sender]) > 0 || (flags & SYN))
        flow->next_sequence[sender] = next;
    if (flags & ACK)
        flow->acknowledged[sender] = get32(tcp + 8);
    if (flags & FIN)
        flow->ended[sender] = true;
    if (flags & RST)
        flow->ended[0] = flow->ended[1] = true;
    if (flow->killed && !(flags & RST))
        reset_end(flow, sender);
    return !flow->killed;
}

static unsigned kill_flows(unsigned most, unsigned port)
{
    unsigned killed = 0;
    while (most == 0 || killed < most) {
        struct flow *busiest = NULL;
        for (struct flow *flow = oldest; flow != NULL; flow = flow->younger) {
            bool ended = flow->killed || (flow->ended[0] && flow->ended[1]);
            bool meant = port == 0 || flow->port[0] == port || flow->port[1] == port;
            if (!ended && meant && (busiest == NULL || flow->bytes > busiest->bytes))
                busiest = flow;
        }
        if (busiest == NULL)
            break;
        busiest->killed = true;
        reset_end(busiest, 0);
        reset_end(busiest, 1);
        killed++;
    }
    return killed;
}

/* --- devices --- */

/* A packet that is worth passing on, or NULL. */
static struct packet *read_packet(int tun, bool *empty)
{
    static struct packet *large;
    if (large == NULL)
        large = allocate(sizeof *large + MOST_BYTES);
    ssize_t length = read(tun, large->data, MOST_BYTES);
    *empty = length <= 0;
    if (length < VNET_BYTES + 20 || large->data[VNET_BYTES] >> 4 != 4)
        return NULL;
    struct packet *packet = large;
    if (length <= SMALL_BYTES) {
        /* Thousands of acknowledgements may be on their way. */
        packet = allocate(sizeof *packet + (size_t)length);
        memcpy(packet->data, large->data, (size_t)length);
    } else {
        large = NULL;
    }
    *packet = (struct packet){.references = 1, .length = (uint32_t)length, .segments = 1};
    const struct virtio_net_hdr *vnet = (void *)packet->data;
    const uint8_t *ip = packet->data + VNET_BYTES;
    uint32_t ip_bytes = (ip[0] & 15) * 4u;
    if ((vnet->gso_type & ~VIRTIO_NET_HDR_GSO_ECN) == VIRTIO_NET_HDR_GSO_TCPV4) {
        packet->header_bytes = (uint16_t)(ip_bytes + (ip[ip_bytes + 12] >> 4) * 4u);
        packet->segment_bytes = vnet->gso_size;
        uint32_t payload = packet->length - VNET_BYTES - packet->header_bytes;
        packet->segments = (uint16_t)((payload + packet->segment_bytes - 1) / packet->segment_bytes);
    }
    return packet;
}

static bool is_tcp(const struct packet *packet)
{
    const uint8_t *ip = packet->data + VNET_BYTES;
    bool first_fragment = (get16(ip + 6) & 0x1fff) == 0;
    return ip[9] == TCP && first_fragment && packet->length >= VNET_BYTES + (ip[0] & 15) * 4u + 20;
}

static void take_in(unsigned from, uint64_t at_ns)
{
    for (int i = 0; i < READS_PER_TURN; i++) {
        bool empty;
        struct packet *packet = read_packet(hosts[from].tun, &empty);
        if (empty)
            return;
        if (packet == NULL)
            continue;
        uint32_t address = get32(packet->data + VNET_BYTES + 16);
        for (unsigned to = 0; to < host_count; to++) {
            if (hosts[to].address != address)
                continue;
            if (hosts[to].site == hosts[from].site)
                deliver(&(struct piece){packet, at_ns, 0, packet->segments});
            else if (!is_tcp(packet) || track(packet))
                arrive(&lines[hosts[from].site][hosts[to].site], packet, at_ns);
        }
        release(packet);
    }
}

static void configure(int control, const char *device, unsigned long request, struct ifreq *ask)
{
    snprintf(ask->ifr_name, sizeof ask->ifr_name, "%s", device);
    if (ioctl(control, request, ask) < 0)
        fail(device);
}

static struct sockaddr inet_address(uint32_t address)
{
    struct sockaddr_in found = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(address)};
    struct sockaddr general;
    memcpy(&general, &found, sizeof general);
    return general;
}

/* The device `wan0` of a namespace. This process stays in the namespace; the device is all it needs of it. */
static int open_tun(int namespace_fd, uint32_t address)
{
    if (setns(namespace_fd, CLONE_NEWNET) < 0)
        fail("can't enter the namespace");
    int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (tun < 0)
        fail("/dev/net/tun");
    struct ifreq ask = {.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR};
    configure(tun, "wan0", TUNSETIFF, &ask);
    int header_bytes = VNET_BYTES;
    if (ioctl(tun, TUNSETVNETHDRSZ, &header_bytes) < 0 || ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) < 0)
        fail("the TUN device has no segmentation offload");
    int control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (control < 0)
        fail("socket");
    configure(control, "lo", SIOCSIFFLAGS, &(struct ifreq){.ifr_flags = IFF_UP});
    configure(control, "wan0", SIOCSIFMTU, &(struct ifreq){.ifr_mtu = MTU_BYTES});
    /* The device's own queue must not drop: the line's queue is the only one. */
    configure(control, "wan0", SIOCSIFTXQLEN, &(struct ifreq){.ifr_qlen = 10000});
    configure(control, "wan0", SIOCSIFADDR, &(struct ifreq){.ifr_addr = inet_address(address)});
    configure(control, "wan0", SIOCSIFNETMASK, &(struct ifreq){.ifr_netmask = inet_address(0xff000000)});
    configure(control, "wan0", SIOCSIFFLAGS, &(struct ifreq){.ifr_flags = IFF_UP});
    close(control);
    close(namespace_fd);
    return tun;
}

/* --- control --- */

static void counters(const struct line *line, char *answer, size_t size)
{
    snprintf(answer, size,
             "ok {\"offered_bytes\": %lu, \"offered_segments\": %lu, \"carried_bytes\": %lu, "
             "\"carried_segments\": %lu, \"lost_segments\": %lu, \"dropped_segments\": %lu, "
             "\"blackholed_segments\": %lu, \"queued_bytes\": %lu, \"refused_writes\": %lu}",
             line->offered_bytes, line->offered_segments, line->carried_bytes, line->carried_segments,
             line->lost_segments, line->dropped_segments, line->blackholed_segments, line->queued_bytes,
             refused_writes);
}

static void obey(const char *command, char *answer, size_t size)
{
    unsigned from, to, most, port;
    double rate, loss;
    uint64_t delay_ns, queue_bytes;
    int blackhole;
    snprintf(answer, size, "error: no such command");
    if (sscanf(command, "set %u %u %lf %lu %lu %lf %d", &from, &to, &rate, &delay_ns, &queue_bytes, &loss,
               &blackhole) == 7) {
        if (from >= MOST_SITES || to >= MOST_SITES)
            return;
        struct line *line = &lines[from][to];
        uint64_t now = now_ns();
        advance(line, now);
        if (line->rate_bits_per_s <= 0 && line->free_ns < now)
            line->free_ns = now; /* the time in which it stood still is not made up for */
        line->rate_bits_per_s = rate;
        line->delay_ns = delay_ns;
        line->queue_bytes = queue_bytes;
        line->loss = loss;
        line->blackhole = blackhole != 0;
        snprintf(answer, size, "ok");
    } else if (sscanf(command, "count %u %u", &from, &to) == 2 && from < MOST_SITES && to < MOST_SITES) {
        advance(&lines[from][to], now_ns());
        counters(&lines[from][to], answer, size);
    } else if (sscanf(command, "kill %u %u", &most, &port) == 2) {
        snprintf(answer, size, "ok %u", kill_flows(most, port));
    }
}

/* False when the other end is gone. */
static bool answer_commands(int control)
{
    char command[256], answer[1024];
    for (;;) {
        ssize_t length = recv(control, command, sizeof command - 1, MSG_DONTWAIT);
        if (length < 0)
            return errno == EAGAIN || errno == EINTR;
        if (length == 0)
            return false;
        command[length] = 0;
        obey(command, answer, sizeof answer);
        if (send(control, answer, strlen(answer), MSG_NOSIGNAL) < 0)
            return false;
    }
}

int main(int count, char **words)
{
    if (count < 6 || count - 4 > MOST_HOSTS) {
        fprintf(stderr, "usage: emulator CONTROL_FD BURST_US SEED NAMESPACE_FD:SITE:ADDRESS...\n");
        return 2;
    }
    int control = atoi(words[1]);
    burst_ns = strtoull(words[2], NULL, 10) * 1000;
    random_state = strtoull(words[3], NULL, 10) * 2 + 88172645463325252u;
    struct pollfd polled[MOST_HOSTS + 1];
    for (int i = 4; i < count; i++) {
        int namespace_fd;
        char text[16];
        struct in_addr address;
        struct host *host = &hosts[host_count];
        if (sscanf(words[i], "%d:%u:%15s", &namespace_fd, &host->site, text) != 3 || host->site >= MOST_SITES ||
            inet_pton(AF_INET, text, &address) != 1) {
            fprintf(stderr, "emulator: %s is no NAMESPACE_FD:SITE:ADDRESS\n", words[i]);
            return 2;
        }
        host->address = ntohl(address.s_addr);
        host->tun = open_tun(namespace_fd, host->address);
        polled[host_count++] = (struct pollfd){host->tun, POLLIN, 0};
    }
    polled[host_count] = (struct pollfd){control, POLLIN, 0};
    /* The link must keep its time when engines use all cores; where this is forbidden it is less exact. */
    sched_setscheduler(0, SCHED_RR, &(struct sched_param){.sched_priority = 1});
    prctl(PR_SET_TIMERSLACK, 1);

    for (;;) {
        uint64_t next_ns = UINT64_MAX, now = now_ns();
        for (unsigned from = 0; from < MOST_SITES; from++)
            for (unsigned to = 0; to < MOST_SITES; to++) {
                uint64_t due_ns = advance(&lines[from][to], now);
                next_ns = due_ns < next_ns ? due_ns : next_ns;
            }
        now = now_ns();
        uint64_t wait_ns = next_ns > now + EARLY_NS ? next_ns - now - EARLY_NS : 0;
        struct timespec wait = {(time_t)(wait_ns / 1000000000u), (long)(wait_ns % 1000000000u)};
        if (ppoll(polled, host_count + 1, next_ns == UINT64_MAX ? NULL : &wait, NULL) < 0 && errno != EINTR)
            fail("ppoll");
        now = now_ns();
        for (unsigned i = 0; i < host_count; i++)
            if (polled[i].revents)
                take_in(i, now);
        if (polled[host_count].revents && !answer_commands(control))
            return 0;
    }
}
