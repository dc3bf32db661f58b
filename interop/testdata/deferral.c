/*
 * deferral: what happens to a SEND that is posted in RTR?
 *
 * Two queue pairs of one device. B is in RTS and has receives. A is in RTR: it posts "first",
 * and if the post is refused it writes "reused" into the same buffer, as a program may do with
 * memory that nobody owns. Then A moves to RTS and posts "second". Each step tells what it saw.
 *
 * usage: deferral DEVICE GID_INDEX
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <infiniband/verbs.h>

enum { SLOT = 32, RECVS = 4, PSN = 7, WAIT_MS = 300 };

static char out[2][SLOT], in[RECVS][SLOT];
static struct ibv_mr *out_mr, *in_mr;
static union ibv_gid gid;
static int gid_index;

static void check(int ok, const char *what)
{
	if (!ok) {
		perror(what);
		exit(1);
	}
}

struct side {
	const char *name;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
};

static void make(struct side *s, const char *name, struct ibv_context *ctx, struct ibv_pd *pd)
{
	s->name = name;
	s->cq = ibv_create_cq(ctx, 16, NULL, NULL, 0);
	check(s->cq != NULL, "ibv_create_cq");
	struct ibv_qp_init_attr attr = {
		.qp_type = IBV_QPT_RC, .send_cq = s->cq, .recv_cq = s->cq,
		.cap = {.max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1},
	};
	s->qp = ibv_create_qp(pd, &attr);
	check(s->qp != NULL, "ibv_create_qp");
	struct ibv_qp_attr init = {.qp_state = IBV_QPS_INIT, .port_num = 1};
	check(!ibv_modify_qp(s->qp, &init, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS), "INIT");
}

static void to_rtr(struct side *s, struct side *peer)
{
	struct ibv_qp_attr a = {
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = peer->qp->qp_num, .rq_psn = PSN, .min_rnr_timer = 12,
		.ah_attr = {.is_global = 1, .port_num = 1, .grh = {.dgid = gid, .sgid_index = gid_index, .hop_limit = 64}},
	};
	check(!ibv_modify_qp(s->qp, &a, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
			     IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER), "RTR");
}

static void to_rts(struct side *s)
{
	struct ibv_qp_attr a = {.qp_state = IBV_QPS_RTS, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .sq_psn = PSN};
	check(!ibv_modify_qp(s->qp, &a, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
			     IBV_QP_MAX_QP_RD_ATOMIC), "RTS");
}

static int post(struct side *s, int slot, const char *text)
{
	strcpy(out[slot], text);
	struct ibv_sge sge = {(uintptr_t)out[slot], SLOT, out_mr->lkey};
	struct ibv_send_wr wr = {.wr_id = slot, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED};
	struct ibv_send_wr *bad = NULL;
	int err = ibv_post_send(s->qp, &wr, &bad);
	printf("%s posts \"%s\": %s, bad_wr %s\n", s->name, text, err ? strerror(err) : "taken", bad ? "set" : "not set");
	return err;
}

static void look(struct side *s)
{
	struct ibv_wc wc;
	int any = 0;

	for (int i = 0; i < WAIT_MS; i++, usleep(1000)) {
		while (ibv_poll_cq(s->cq, 1, &wc) > 0) {
			any = 1;
			if (wc.opcode == IBV_WC_RECV && !wc.status)
				printf("%s receives \"%s\"\n", s->name, in[wc.wr_id]);
			else
				printf("%s completes post %d: %s\n", s->name, (int)wc.wr_id, ibv_wc_status_str(wc.status));
		}
	}
	if (!any)
		printf("%s sees nothing\n", s->name);
}

int main(int argc, char **argv)
{
	struct ibv_context *ctx = NULL;
	struct side a, b;
	int n;

	if (argc != 3) {
		fprintf(stderr, "usage: deferral DEVICE GID_INDEX\n");
		return 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	gid_index = atoi(argv[2]);
	struct ibv_device **list = ibv_get_device_list(&n);
	for (int i = 0; i < n; i++)
		if (!strcmp(ibv_get_device_name(list[i]), argv[1]))
			ctx = ibv_open_device(list[i]);
	check(ctx != NULL, argv[1]);
	check(!ibv_query_gid(ctx, 1, gid_index, &gid), "ibv_query_gid");
	struct ibv_pd *pd = ibv_alloc_pd(ctx);
	check(pd != NULL, "ibv_alloc_pd");
	out_mr = ibv_reg_mr(pd, out, sizeof out, 0);
	in_mr = ibv_reg_mr(pd, in, sizeof in, IBV_ACCESS_LOCAL_WRITE);
	check(out_mr && in_mr, "ibv_reg_mr");
	make(&a, "A", ctx, pd);
	make(&b, "B", ctx, pd);
	for (int i = 0; i < RECVS; i++) {
		struct ibv_sge sge = {(uintptr_t)in[i], SLOT, in_mr->lkey};
		struct ibv_recv_wr wr = {.wr_id = i, .sg_list = &sge, .num_sge = 1}, *bad;
		check(!ibv_post_recv(b.qp, &wr, &bad), "ibv_post_recv");
	}
	to_rtr(&a, &b);
	to_rtr(&b, &a);
	to_rts(&b);

	printf("A is in RTR\n");
	if (post(&a, 0, "first"))
		strcpy(out[0], "reused");
	look(&a);
	look(&b);
	to_rts(&a);
	printf("A is in RTS\n");
	look(&a);
	look(&b);
	post(&a, 1, "second");
	look(&a);
	look(&b);
	return 0;
}
