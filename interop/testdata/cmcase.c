/*
 * cmcase: ends of a connection that the stock tools do not play.
 *
 *   cmcase connect ADDR PORT TEXT         connect with TEXT as private data, then send it and wait
 *                                         for an answer; or say how the connection was refused
 *   cmcase reject ADDR PORT TEXT          take one request and refuse it with TEXT
 *   cmcase slow ADDR PORT SECONDS         take one request, accept it after a while, echo one message
 *
 * A line on stdout tells what happened; exit code 0 means that it could be told.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <rdma/rdma_cma.h>
#include <rdma/rdma_verbs.h>

enum { SIZE = 64 };

static char buf[SIZE];
static struct ibv_mr *mr;

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

/* queue_pair makes the connection's queue pair and posts one receive. */
static void queue_pair(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr attr = {
		.qp_type = IBV_QPT_RC, .sq_sig_all = 1,
		.cap = {.max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1},
	};

	if (rdma_create_qp(id, NULL, &attr))
		fail("rdma_create_qp");
	mr = rdma_reg_msgs(id, buf, SIZE);
	if (!mr || rdma_post_recv(id, NULL, buf, SIZE, mr))
		fail("rdma_post_recv");
}

/* talk sends n bytes and waits until they have left. */
static void talk(struct rdma_cm_id *id, int n)
{
	struct ibv_wc wc;

	if (rdma_post_send(id, NULL, buf, n, mr, 0) || rdma_get_send_comp(id, &wc) < 1 || wc.status)
		fail("send");
}

/* hear waits for a message and returns its length. */
static int hear(struct rdma_cm_id *id)
{
	struct ibv_wc wc;

	if (rdma_get_recv_comp(id, &wc) < 1 || wc.status)
		fail("receive");
	return wc.byte_len;
}

static struct rdma_cm_id *resolve(const char *addr, const char *port, int passive)
{
	struct rdma_addrinfo hints = {.ai_port_space = RDMA_PS_TCP, .ai_flags = RAI_NUMERICHOST | (passive ? RAI_PASSIVE : 0)};
	struct rdma_addrinfo *info;
	struct rdma_cm_id *id;

	if (rdma_getaddrinfo(addr, port, &hints, &info))
		fail("rdma_getaddrinfo");
	if (rdma_create_ep(&id, info, NULL, NULL))
		fail("rdma_create_ep");
	rdma_freeaddrinfo(info);
	return id;
}

static int do_connect(const char *addr, const char *port, const char *text)
{
	struct rdma_cm_id *id = resolve(addr, port, 0);
	struct rdma_conn_param p = {
		.private_data = text, .private_data_len = strlen(text) + 1,
		.responder_resources = 1, .initiator_depth = 1, .retry_count = 7, .rnr_retry_count = 7,
	};

	queue_pair(id);
	if (rdma_connect(id, &p)) {
		if (!id->event || id->event->event != RDMA_CM_EVENT_REJECTED)
			fail("rdma_connect");
		printf("rejected, reason %d, private data \"%.32s\"\n", id->event->status,
		       id->event->param.conn.private_data_len ? (const char *)id->event->param.conn.private_data : "");
		return 0;
	}
	printf("connected, private data \"%.32s\"\n",
	       id->event && id->event->param.conn.private_data_len ? (const char *)id->event->param.conn.private_data : "");
	fflush(stdout);
	hear(id);
	printf("heard \"%.32s\"\n", buf);
	rdma_disconnect(id);
	return 0;
}

static struct rdma_cm_id *request(const char *addr, const char *port)
{
	struct rdma_cm_id *ln = resolve(addr, port, 1), *id;

	if (rdma_listen(ln, 4) || rdma_get_request(ln, &id))
		fail("rdma_get_request");
	printf("request, private data \"%.32s\"\n", (const char *)id->event->param.conn.private_data);
	fflush(stdout);
	return id;
}

int main(int argc, char **argv)
{
	struct rdma_cm_id *id;

	if (argc != 5) {
		fprintf(stderr, "usage: cmcase connect|reject|slow ADDR PORT TEXT|SECONDS\n");
		return 2;
	}
	if (!strcmp(argv[1], "connect"))
		return do_connect(argv[2], argv[3], argv[4]);
	id = request(argv[2], argv[3]);
	if (!strcmp(argv[1], "reject")) {
		if (rdma_reject(id, argv[4], strlen(argv[4]) + 1))
			fail("rdma_reject");
		return 0;
	}
	sleep(atoi(argv[4]));
	queue_pair(id);
	if (rdma_accept(id, NULL))
		fail("rdma_accept");
	talk(id, hear(id));
	rdma_disconnect(id);
	printf("echoed\n");
	return 0;
}
