/*
 * A stack that goes around the kernel, in the small, to be preloaded: what a program gets from socket() for datagrams is no
 * socket of the kernel, so every call on it has to come here. Behind it there is one, which the program does not know.
 *
 * Refuses what such stacks do not have (segmentation offload, coalescing, times of arrival, drop counts), and writes how often
 * each call came in to the file named by TEELINE_TEST_CALLS when the program ends.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

enum { SOCKETS = 1024, WATCHED = 64, UDP_LEVEL = 17, CUT = 103, JOIN = 104 };

/* The kernel's socket behind one of ours, plus one. */
static int behind[SOCKETS];

#define CALLS(call) \
    call(socket) call(close) call(bind) call(connect) call(getsockname) call(setsockopt) call(getsockopt) call(ioctl) \
    call(fcntl) call(send) call(sendto) call(sendmsg) call(recv) call(recvfrom) call(recvmsg) call(poll) call(ppoll)
#define ENUM(name) CALL_##name,
#define NAME(name) #name,
enum { CALLS(ENUM) CALLS_COUNT };
static const char *const names[] = { CALLS(NAME) };
static unsigned long counts[CALLS_COUNT];

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Whether `fd` is one of ours; if so, counts the call and puts the kernel's in its place. */
static int ours(int *fd, int call)
{
    if (*fd < 0 || *fd >= SOCKETS || behind[*fd] == 0)
        return 0;
    __atomic_fetch_add(&counts[call], 1, __ATOMIC_RELAXED);
    *fd = behind[*fd] - 1;
    return 1;
}

int socket(int domain, int type, int protocol)
{
    int kernels = REAL(socket)(domain, type, protocol);
    if (kernels < 0 || (domain != AF_INET && domain != AF_INET6) || (type & 0xf) != SOCK_DGRAM)
        return kernels;
    int front = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (front < 0 || front >= SOCKETS)
        abort();
    behind[front] = kernels + 1;
    __atomic_fetch_add(&counts[CALL_socket], 1, __ATOMIC_RELAXED);
    return front;
}

int close(int fd)
{
    int front = fd;
    if (ours(&fd, CALL_close)) {
        behind[front] = 0;
        REAL(close)(front);
    }
    return REAL(close)(fd);
}

int bind(int fd, const struct sockaddr *address, socklen_t length)
{
    ours(&fd, CALL_bind);
    return REAL(bind)(fd, address, length);
}

int connect(int fd, const struct sockaddr *address, socklen_t length)
{
    ours(&fd, CALL_connect);
    return REAL(connect)(fd, address, length);
}

int getsockname(int fd, struct sockaddr *address, socklen_t *length)
{
    ours(&fd, CALL_getsockname);
    return REAL(getsockname)(fd, address, length);
}

int setsockopt(int fd, int level, int name, const void *value, socklen_t length)
{
    int refused = (level == UDP_LEVEL && (name == CUT || name == JOIN))
        || (level == SOL_SOCKET && (name == SO_TIMESTAMPNS || name == SO_RXQ_OVFL || name == SO_BUSY_POLL));
    if (ours(&fd, CALL_setsockopt) && refused) {
        errno = ENOPROTOOPT;
        return -1;
    }
    return REAL(setsockopt)(fd, level, name, value, length);
}

int getsockopt(int fd, int level, int name, void *value, socklen_t *length)
{
    if (ours(&fd, CALL_getsockopt) && level == SOL_SOCKET && name == SO_MEMINFO) {
        errno = ENOPROTOOPT;
        return -1;
    }
    return REAL(getsockopt)(fd, level, name, value, length);
}

int ioctl(int fd, unsigned long request, ...)
{
    va_list rest;
    va_start(rest, request);
    void *value = va_arg(rest, void *);
    va_end(rest);
    ours(&fd, CALL_ioctl);
    return REAL(ioctl)(fd, request, value);
}

int fcntl(int fd, int command, ...)
{
    va_list rest;
    va_start(rest, command);
    void *value = va_arg(rest, void *);
    va_end(rest);
    ours(&fd, CALL_fcntl);
    return REAL(fcntl)(fd, command, value);
}

int fcntl64(int fd, int command, ...)
{
    va_list rest;
    va_start(rest, command);
    void *value = va_arg(rest, void *);
    va_end(rest);
    ours(&fd, CALL_fcntl);
    return REAL(fcntl)(fd, command, value);
}

ssize_t send(int fd, const void *bytes, size_t length, int flags)
{
    ours(&fd, CALL_send);
    return REAL(send)(fd, bytes, length, flags);
}

ssize_t sendto(int fd, const void *bytes, size_t length, int flags, const struct sockaddr *to, socklen_t to_length)
{
    ours(&fd, CALL_sendto);
    return REAL(sendto)(fd, bytes, length, flags, to, to_length);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags)
{
    ours(&fd, CALL_sendmsg);
    return REAL(sendmsg)(fd, message, flags);
}

ssize_t recv(int fd, void *bytes, size_t length, int flags)
{
    ours(&fd, CALL_recv);
    return REAL(recv)(fd, bytes, length, flags);
}

ssize_t recvfrom(int fd, void *bytes, size_t length, int flags, struct sockaddr *from, socklen_t *from_length)
{
    ours(&fd, CALL_recvfrom);
    return REAL(recvfrom)(fd, bytes, length, flags, from, from_length);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags)
{
    ours(&fd, CALL_recvmsg);
    return REAL(recvmsg)(fd, message, flags);
}

/* Puts the kernel's sockets in the place of ours. */
static void translate(const struct pollfd *watched, nfds_t count, struct pollfd *kernels, int call)
{
    if (count > WATCHED)
        abort();
    memcpy(kernels, watched, count * sizeof *watched);
    for (nfds_t at = 0; at < count; at++)
        ours(&kernels[at].fd, call);
}

static int told(struct pollfd *watched, nfds_t count, const struct pollfd *kernels, int found)
{
    for (nfds_t at = 0; at < count; at++)
        watched[at].revents = kernels[at].revents;
    return found;
}

int poll(struct pollfd *watched, nfds_t count, int timeout)
{
    struct pollfd kernels[WATCHED];
    translate(watched, count, kernels, CALL_poll);
    return told(watched, count, kernels, REAL(poll)(kernels, count, timeout));
}

int ppoll(struct pollfd *watched, nfds_t count, const struct timespec *timeout, const sigset_t *mask)
{
    struct pollfd kernels[WATCHED];
    translate(watched, count, kernels, CALL_ppoll);
    return told(watched, count, kernels, REAL(ppoll)(kernels, count, timeout, mask));
}

__attribute__((destructor)) static void report(void)
{
    const char *path = getenv("TEELINE_TEST_CALLS");
    FILE *file = path ? fopen(path, "w") : NULL;
    if (!file)
        return;
    for (int at = 0; at < CALLS_COUNT; at++)
        fprintf(file, "%s %lu\n", names[at], counts[at]);
    fclose(file);
}
